"""Quantization of KV cache rows to 8 bits: a code for every number, and a scale for every row of a KV head.

A row is quantized once, when it is appended, and only codes and scales are kept. Every backend computes with the same
dequantized numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.errors import UsageError

LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
STATE_DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # by their short names
SCALE_DTYPE = torch.bfloat16
LEAST_SCALE = 2.0**-100  # the scale of a row of zeros


def parse_state_dtype(state_dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype, or its name; None: rows are kept in the dtype that the model computes in."""
    if state_dtype is None or state_dtype in LARGEST:
        return state_dtype
    dtype = STATE_DTYPES.get(str(state_dtype).removeprefix("torch."))
    if dtype is None:
        names = ", ".join(map(repr, STATE_DTYPES))
        raise UsageError(
            f"must be None, one of {names}, or the torch dtype of one", name="state_dtype", value=state_dtype
        )
    return dtype


def state_dtype_name(state_dtype: torch.dtype) -> str:
    """The short name that saved states record."""
    return next(name for name, dtype in STATE_DTYPES.items() if dtype == state_dtype)


class Rows(NamedTuple):
    """Keys or values as slots keep them."""

    codes: Tensor  # [..., D] 8-bit codes, or the numbers themselves
    scale: Tensor | None  # [...]; None: not quantized

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Rows with changed codes and, where there are any, changed scales."""
        return Rows(change(self.codes), None if self.scale is None else change(self.scale))

    def pick_heads(self, heads: slice) -> Rows:
        """The rows [K, n, D] of some heads; views."""
        return self.map(lambda tensor: tensor[heads])

    def to(self, device: torch.device) -> Rows:
        """Copies on a device, begun at least, or the rows themselves if they are there."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers in the dtype that the model computes in."""
        return self.codes if self.scale is None else (self.codes.float() * self.scale.float()[..., None]).to(dtype)


def quantize(numbers: Tensor, dtype: torch.dtype | None) -> Rows:
    """numbers [..., D]; dtype None leaves them as they are."""
    if dtype is None:
        return Rows(numbers, None)
    exact, largest = numbers.float(), LARGEST[dtype]
    scale = (exact.abs().amax(-1) * (1.0 / largest)).clamp(min=LEAST_SCALE).to(SCALE_DTYPE).contiguous()
    codes = exact * (1.0 / scale.float())[..., None]
    if dtype == torch.int8:
        codes = codes.round()
    return Rows(codes.clamp(-largest, largest).to(dtype), scale)
