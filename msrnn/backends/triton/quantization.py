"""Quantization of rows inside a kernel; `msrnn.core.quantization` is the reference."""

from __future__ import annotations

import triton
import triton.language as tl

from msrnn.core.quantization import LEAST_SCALE

LEAST = tl.constexpr(LEAST_SCALE)
TO_WHOLE = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds a small float32 to an integer, ties to even
BIAS, BIAS_BITS, UNIT = tl.constexpr(384.0), tl.constexpr(0x43C00000), tl.constexpr(2**15)  # of floats from 256 to 511


@triton.jit
def quantize(b_rows, largest, WHOLE: tl.constexpr):
    """`msrnn.core.quantization.quantize` of rows [n, W]: their codes, as float32, and their scales [n, 1].

    A maximum ignores NaN, so a row that contains one gets NaN as its scale.
    """
    b_rows = b_rows.to(tl.float32)
    odd = tl.max((b_rows != b_rows).to(tl.int32), axis=1, keep_dims=True)
    top = tl.maximum(tl.max(tl.abs(b_rows), axis=1, keep_dims=True) * (1.0 / tl.cast(largest, tl.float32)), LEAST)
    bits = top.to(tl.uint32, bitcast=True)
    scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)  # as bfloat16, to even
    scale = tl.where(odd > 0, float("nan"), scale)
    b_rows = tl.minimum(tl.maximum(b_rows * tl.div_rn(1.0, scale), -largest), largest)
    if WHOLE:
        b_rows = (b_rows + TO_WHOLE) - TO_WHOLE
    return b_rows, scale


@triton.jit
def numbers(b_codes, WHOLE: tl.constexpr):
    """Codes in float32; those of int8 have BIAS added, since that is faster than a conversion."""
    if WHOLE:
        return (b_codes.to(tl.int32) * UNIT + BIAS_BITS).to(tl.float32, bitcast=True)
    return b_codes.to(tl.float32)


@triton.jit
def write(
    b_rows, p_rows, p_scales, i_row, m_row, W: tl.constexpr, o_w, m_w, largest,
    QUANTIZED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write new rows [n, W] to rows i_row [n, 1] where m_row is true; returns the dequantized rows, float32."""
    scale = 1.0
    if QUANTIZED:
        b_rows, scale = quantize(b_rows, largest, WHOLE)
        tl.store(p_scales + i_row, scale.to(tl.bfloat16), mask=m_row)
    b_kept = b_rows.to(p_rows.dtype.element_ty)
    tl.store(p_rows + i_row * W + o_w, b_kept, mask=m_row & m_w)
    return b_kept.to(tl.float32) * scale
