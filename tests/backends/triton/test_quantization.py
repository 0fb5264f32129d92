"""Rows that a kernel quantizes are those of `msrnn.core.quantization`."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from msrnn.bound import Bound
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.policy import Policy
from tests.helpers.decode_steps import but, check, layer

pytestmark = pytest.mark.usefixtures("poisoned")


def placed(positions: str, device: str) -> Repositioning | None:
    apart, frequency = spacing(positions), 100.0 ** -(torch.arange(8, device=device) / 8)
    return Repositioning(apart, Rope(frequency.float())) if apart else None


@pytest.mark.parametrize(
    ("code", "heads", "positions"),
    but([("int8", 6, "compressed")], product(STATE_DTYPES, [2, 6], ["original", "compressed"])),
)
def test_eight_bits(code: str, heads: int, positions: str, device: str) -> None:
    if (device, code) == ("cpu", "fp8"):
        pytest.skip("triton's interpreter loses the carry when it rounds to float8: this one needs a GPU")
    check(
        layer(
            device,
            Bound(Policy.parse("h2o"), 6),
            heads,
            state_dtype=STATE_DTYPES[code],
            repositioning=placed(positions, device),
        ),
        steps=5,
        before=5,
    )
