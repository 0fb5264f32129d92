"""Exponentials for ranking inside a kernel: as wide a range as float32 has, as `numba/rows.py` takes them."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT, PER_UNIT = tl.constexpr(2.0**86), tl.constexpr(2.0**-86)
ROOT = tl.constexpr(2.0**43)
LEAST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def lifted_exp(b_x):
    """UNIT * exp(b_x) of what is not above 0: a normal number down to -147, where exp itself ends at -87.

    As a square: to add to b_x instead would cost digits.
    """
    b_root = tl.exp(0.5 * b_x) * ROOT
    return b_root * b_root
