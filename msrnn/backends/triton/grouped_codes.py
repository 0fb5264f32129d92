"""Attention of several query heads to rows of 8-bit codes that they share.

Two codes are loaded as one number of 16 bits, since numbers of 8 bits cannot be transposed on their way from shared
memory. Moving bits makes them float16; those of even and those of odd dimensions are factors of products of their own.
Slots are the rows of the products, so that few query heads fill few columns. Index names as in `attend.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from msrnn.backends.triton.common import weigh

COLUMNS = 8  # the fewest of a product on tensor cores
PORTABLE = tl.constexpr(bool(knobs.runtime.interpret or torch.version.hip))  # without assembly of NVIDIA's GPUs
# float16 ends below 2^16 and is exact from 2^-14 on, so factors are made relative to the largest.
HIGH, PER_HIGH, LEAST = tl.constexpr(2.0**15), tl.constexpr(2.0**-15), tl.constexpr(2.0**-100)
PER_CODE = tl.constexpr(2.0**-7)
EXPONENT = tl.constexpr(0x7F800000)  # the bits of a float32 that make its power of two
WHOLE_BITS, WHOLE_BIAS = tl.constexpr(0x6480), tl.constexpr(1152.0)  # a code + 128 as low bits of a float16 from 1024

# Both at once for two numbers: the compiler would take them apart, to shift or to convert each.
SPREAD_WHOLE = tl.constexpr("""{
    .reg .b32 high;
    lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
    shr.b32 high, $2, 8;
    lop3.b32 $1, high, 0x00ff00ff, 0x64806480, 0x6a;
}""")  # 0x6a: (a & b) ^ c
SPREAD_FLOATS = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


class Pairs(NamedTuple):
    """The query heads of a program as columns, float16: numbers of even and of odd dimensions [BP, BR]."""

    b_even: Any
    b_odd: Any
    scale: Any  # of their products with keys


class Scales(NamedTuple):
    """Scales [BS] of the rows of a block of slots; arbitrary for empty slots."""

    b_key: Any
    b_value: Any


class Outputs(NamedTuple):
    """The part of the slots seen so far: maxima and sums of exponentials [BR], and outputs [BP, BR], all float32."""

    b_max: Any
    b_sum: Any
    b_even: Any  # in units of b_unit * PER_HIGH
    b_odd: Any
    b_unit: Any  # [BR]: the largest of all weights, times the scales of their rows


@triton.constexpr_function
def count_columns(heads: int) -> int:
    """The columns of a product, for this many query heads: a power of two."""
    return max(COLUMNS, int(triton.next_power_of_2(heads)))


@triton.jit
def _split(b_rows):
    """Even and odd columns of rows [BR, BW], as columns."""
    b_even, b_odd = tl.split(tl.reshape(b_rows, [b_rows.shape[0], b_rows.shape[1] // 2, 2]))
    return tl.trans(b_even), tl.trans(b_odd)


@triton.jit
def pair_query(b_q, scale):
    """Query heads [BR, BD] of 16 bits, times a power of two: their numbers are exact, but for negligible ones."""
    b_q = b_q.to(tl.float32)
    top = tl.maximum(tl.max(tl.max(tl.abs(b_q), axis=1), axis=0), LEAST)
    unit = (top.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True) * (2 * PER_HIGH)
    b_even, b_odd = _split((b_q * (1.0 / unit)).to(tl.float16))
    return Pairs(b_even, b_odd, unit * scale)


@triton.jit
def load_scales(keys, values, o_s, S: tl.constexpr):
    """For the block after the next product: numbers of 16 bits are not loaded ahead by the compiler."""
    b_key = tl.load(keys.p_scale + keys.i_row + o_s, mask=o_s < S, other=0.0)
    return Scales(b_key, tl.load(values.p_scale + values.i_row + o_s, mask=o_s < S, other=0.0))


@triton.jit
def _load(rows, o_s, o_p, m_s):
    """Pairs of codes of slots o_s; o_s and o_p are columns and rows, in the order of the result's dimensions."""
    pairs = rows.W // 2
    p_pairs = rows.p_rows.to(tl.pointer_type(tl.uint16), bitcast=True) + (rows.i_row + o_s) * pairs
    return tl.load(p_pairs + o_p, mask=m_s & (o_p < pairs), other=0)


@triton.jit
def _convert_codes(b_pairs, WHOLE: tl.constexpr):
    """The codes of even and of odd dimensions, float16."""
    if not PORTABLE:
        b_even, b_odd = tl.inline_asm_elementwise(
            SPREAD_WHOLE if WHOLE else SPREAD_FLOATS, "=&r,=&r,r", [b_pairs], (tl.float16, tl.float16), True, 2
        )
    elif WHOLE:
        b_even = ((b_pairs & 0xFF) ^ WHOLE_BITS).to(tl.float16, bitcast=True)
        b_odd = ((b_pairs >> 8) ^ WHOLE_BITS).to(tl.float16, bitcast=True)
    else:
        b_even = (b_pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        b_odd = (b_pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return (b_even - WHOLE_BIAS, b_odd - WHOLE_BIAS) if WHOLE else (b_even, b_odd)


@triton.jit
def score_pairs(q, keys, scales, o_s, S: tl.constexpr):
    """Scores [BR, BS] of a block of slots, before a soft cap; arbitrary for empty slots."""
    o_p = tl.arange(0, keys.o_w.shape[0] // 2)
    b_pairs = _load(keys, o_s[:, None], o_p[None, :], (o_s < S)[:, None])
    b_even, b_odd = _convert_codes(b_pairs, keys.p_rows.dtype.element_ty == tl.int8)
    b_s = tl.trans(tl.dot(b_odd, q.b_odd, tl.dot(b_even, q.b_even)))
    return b_s * (scales.b_key.to(tl.float32) * q.scale)[None, :]


@triton.jit
def attend_pairs(seen, b_s, values, scales, o_s, m_held, S: tl.constexpr):
    """Continue the softmax with the scores [BR, BS] of a block of slots."""
    WHOLE: tl.constexpr = values.p_rows.dtype.element_ty == tl.int8
    b_max, b_sum, b_old, b_p = weigh(seen.b_max, seen.b_sum, b_s, m_held)
    b_p *= tl.where(m_held, scales.b_value.to(tl.float32), 0.0)[None, :]
    b_old *= seen.b_unit
    b_unit = tl.maximum(tl.maximum(b_old, tl.max(b_p, axis=1)), LEAST)
    b_share = 1.0 / b_unit
    b_p, b_old = tl.trans((b_p * (b_share * HIGH)[:, None]).to(tl.float16)), (b_old * b_share)[None, :]
    o_p = tl.arange(0, values.o_w.shape[0] // 2)
    m_s = o_s < S if WHOLE else m_held  # in an empty slot there may be a NaN, but none among whole numbers
    b_even, b_odd = _convert_codes(_load(values, o_s[None, :], o_p[:, None], m_s[None, :]), WHOLE)
    b_even, b_odd = tl.dot(b_even, b_p, seen.b_even * b_old), tl.dot(b_odd, b_p, seen.b_odd * b_old)
    return Outputs(b_max, b_sum, b_even, b_odd, b_unit)


@triton.jit
def split_outputs(seen):
    """A softmax with outputs [BR, BV], to be continued by `attend_pairs`."""
    b_unit = tl.maximum(tl.max(tl.abs(seen.b_o), axis=1) * PER_CODE, LEAST)
    b_even, b_odd = _split(seen.b_o * (1.0 / b_unit * HIGH)[:, None])
    return Outputs(seen.b_max, seen.b_sum, b_even, b_odd, b_unit)


@triton.jit
def join_outputs(seen):
    """Outputs [BR, BV] of all that was seen."""
    b_o = tl.join(tl.trans(seen.b_even), tl.trans(seen.b_odd))
    return tl.reshape(b_o, [b_o.shape[0], b_o.shape[1] * 2]) * (seen.b_unit * PER_HIGH)[:, None]
