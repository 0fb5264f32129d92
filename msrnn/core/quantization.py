"""States in 8 bits: a code for every number, and a scale for every row of a KV head.

Codes and scales are all that is kept: a row is rounded once, as it is appended, and every evaluation order computes
with the same numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.errors import UsageError

LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
STATE_DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SCALE_DTYPE = torch.bfloat16
LEAST_SCALE = 2.0**-100  # of a row of zeros


def state_dtype_of(name: str | None) -> torch.dtype | None:
    """None: states are kept as the model computes them."""
    if name is not None and name not in STATE_DTYPES:
        raise UsageError(f"state_dtype={name!r}: must be None, {' or '.join(map(repr, STATE_DTYPES))}")
    return STATE_DTYPES[name] if name else None


class Rows(NamedTuple):
    """Keys or values as they are kept."""

    codes: Tensor  # [..., D], in 8 bits, or the numbers themselves
    scale: Tensor | None  # [...]; None: the numbers themselves

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers, in the dtype that a model computes in."""
        return self.codes if self.scale is None else (self.codes.float() * self.scale.float()[..., None]).to(dtype)


def encode(numbers: Tensor, code: torch.dtype | None) -> Rows:
    """numbers [..., D], as they are where there is no code."""
    if code is None:
        return Rows(numbers, None)
    exact, largest = numbers.float(), LARGEST[code]
    scale = (exact.abs().amax(-1) * (1.0 / largest)).clamp(min=LEAST_SCALE).to(SCALE_DTYPE).contiguous()
    codes = exact * (1.0 / scale.float())[..., None]
    if code == torch.int8:
        codes = codes.round()
    return Rows(codes.clamp(-largest, largest).to(code), scale)
