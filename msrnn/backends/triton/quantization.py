"""Quantization of rows inside a kernel; `msrnn.core.quantization` is the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from msrnn.core.quantization import LEAST_SCALE

LEAST = tl.constexpr(LEAST_SCALE)
TO_WHOLE = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds a small float32 to an integer, ties to even
BIAS, BIAS_BITS, UNIT = tl.constexpr(384.0), tl.constexpr(0x43C00000), tl.constexpr(2**15)  # of floats from 256 to 511


class Buffer(NamedTuple):
    """Keys or values in the slots of a layer, and where those of a program's first KV head are."""

    p_rows: Any  # [B, K, S, W]
    p_scale: Any  # [B, K, S], or None where rows are not quantized
    i_row: Any  # the first of S rows
    o_w: Any  # [BW]
    W: Any


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
def numbers(b_codes):
    """Codes in float32; those of int8 have BIAS added, since that is faster than a conversion."""
    if b_codes.dtype == tl.int8:
        return (b_codes.to(tl.int32) * UNIT + BIAS_BITS).to(tl.float32, bitcast=True)
    return b_codes.to(tl.float32)


@triton.jit
def write(b_rows, buffer, slot, largest, S: tl.constexpr):
    """Write new rows [n, W] of n KV heads to a slot, unless it is beyond S; returns the dequantized rows, float32."""
    o_n, o_w = tl.arange(0, b_rows.shape[0])[:, None], buffer.o_w[None, :]
    i_row, m_row = buffer.i_row + o_n * S + slot, (o_n >= 0) & (slot < S)
    scale = 1.0
    if buffer.p_scale is not None:
        b_rows, scale = quantize(b_rows, largest, buffer.p_rows.dtype.element_ty == tl.int8)
        tl.store(buffer.p_scale + i_row, scale.to(tl.bfloat16), mask=m_row)
    b_kept = b_rows.to(buffer.p_rows.dtype.element_ty)
    tl.store(buffer.p_rows + i_row * buffer.W + o_w, b_kept, mask=m_row & (o_w < buffer.W))
    return b_kept.to(tl.float32) * scale
