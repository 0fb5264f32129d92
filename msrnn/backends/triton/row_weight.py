"""The weight of a new token's row in a decode step; the references are `row_weights` and `weight_network` of the core.

A learned weight needs one launch more, between attention and eviction. A program for each KV head runs its network on
the row that attention has just written, as the slots keep it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.common import width
from msrnn.backends.triton.rope import find_rotation
from msrnn.core import row_weights, weight_network
from msrnn.core.slots import Slots

MOST_DEVIATION = tl.constexpr(weight_network.MOST_DEVIATION)
MOST_EXPONENT = tl.constexpr(weight_network.MOST_EXPONENT)
(SHIFT_1, FACTOR_1), (SHIFT_2, FACTOR_2), (SHIFT_3, _) = (map(tl.constexpr, pair) for pair in row_weights.SCRAMBLERS)
SLOPE = tl.constexpr(-2 * (2 / torch.pi) ** 0.5)  # of the exponent in gelu
HIDDEN = 16  # numbers of a hidden layer at once
GRADE_WARPS = 4


@triton.jit
def scramble(number):
    """A permutation of uint32 without a pattern."""
    number = (number ^ (number >> SHIFT_1)) * FACTOR_1
    number = (number ^ (number >> SHIFT_2)) * FACTOR_2
    return number ^ (number >> SHIFT_3)


@triton.jit
def draw_weight(t, layer, group):
    """The random weight of token t in a group of a layer."""
    own = scramble(group.to(tl.uint32) + scramble(layer.to(tl.uint32)))
    drawn = scramble(scramble(t.to(tl.uint32)) ^ own)
    return (drawn >> 8).to(tl.float32) * (1.0 / 2**24)


@triton.jit
def _clamp(b_x, most):
    """NaN stays NaN: both comparisons are false."""
    return tl.where(b_x > most, most, tl.where(b_x < -most, -most, b_x))


@triton.jit
def combine_weight(square, graded, alpha):
    """The learned weight of a row, from the squared norm of its values and from what its networks say of it."""
    return tl.exp(_clamp((0.5 * tl.log(square) + graded) / alpha, MOST_EXPONENT))


@triton.jit
def _load_row(rows, scale, i_row, o_w, W):
    """A row [BW] as the slots keep it, float32."""
    b_row = tl.load(rows + i_row * W + o_w, mask=(o_w >= 0) & (o_w < W), other=0.0).to(tl.float32)
    if scale is not None:
        b_row *= tl.load(scale + i_row).to(tl.float32)
    return b_row


@triton.jit
def _load_key(keys, scale, i_row, o_d, t, frequency, D, F: tl.constexpr, START: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """A key [BD] as it was before the model rotated it at position t."""
    b_key = _load_row(keys, scale, i_row, o_d, D)
    if F > 0:
        o_r = o_d - START
        m_r = (o_r >= 0) & (o_r < 2 * F)
        if NEIGHBOURS:
            o_f, m_second, apart = o_r // 2, o_r % 2 == 1, 1
        else:
            o_f, m_second, apart = tl.where(o_r >= F, o_r - F, o_r), o_r >= F, F
        b_other = _load_row(keys, scale, i_row, tl.where(m_r, tl.where(m_second, o_d - apart, o_d + apart), -1), D)
        b_frequency = tl.load(frequency + o_f, mask=m_r, other=0.0)
        b_cos, b_sin = find_rotation((t.to(tl.float32) * b_frequency).to(tl.float64))
        b_key = tl.where(m_r, b_key * b_cos + tl.where(m_second, -b_other, b_other) * b_sin, b_key)
    return b_key


@triton.jit
def _load_inputs(b_row, mean, scale, i_k, o_w, first, I, m_w):  # noqa: E741
    """The numbers of a row as a network takes them."""
    b_mean = tl.load(mean + i_k * I + first + o_w, mask=m_w, other=0.0)
    b_scale = tl.load(scale + i_k * I + first + o_w, mask=m_w, other=1.0)
    return _clamp((b_row - b_mean) / b_scale, MOST_DEVIATION)


@triton.jit
def grade_kernel(
    keys, values, key_scale, value_scale, fresh, query_position, frequency,
    mean, scale, hidden, hidden_bias, output, output_bias, graded,
    K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    F: tl.constexpr, START: tl.constexpr, NEIGHBOURS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """graded [B, K]: what each KV head's network says of the row in slot `fresh` [B, G]; `fresh` is that of the group.

    Scales of quantized rows may be None, and frequency where F is 0.
    """
    i_b, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.load(query_position + i_b)
    if t >= 0:
        slot = tl.load(fresh + i_b * G + i_k * G // K)
        if slot < S:
            i_row = (i_b * K + i_k) * S + slot
            I: tl.constexpr = D + DV  # noqa: E741
            o_d, o_v, o_n = tl.arange(0, width(D)), tl.arange(0, width(DV)), tl.arange(0, BN)
            m_d, m_v = o_d < D, o_v < DV
            b_key = _load_key(keys, key_scale, i_row, o_d, t, frequency, D, F, START, NEIGHBOURS)
            b_value = _load_row(values, value_scale, i_row, o_v, DV)
            b_key = tl.where(m_d, _load_inputs(b_key, mean, scale, i_k, o_d, 0, I, m_d), 0.0)
            b_value = tl.where(m_v, _load_inputs(b_value, mean, scale, i_k, o_v, D, I, m_v), 0.0)
            total = tl.load(output_bias + i_k)
            for first in range(0, N, BN):
                i_n, m_n = i_k * N + first + o_n, first + o_n < N
                p_hidden = hidden + i_n[:, None] * I
                b_h = tl.load(p_hidden + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
                b_x = tl.sum(b_h * b_key[None, :], axis=1)
                b_h = tl.load(p_hidden + D + o_v[None, :], mask=m_n[:, None] & m_v[None, :], other=0.0)
                b_x += tl.sum(b_h * b_value[None, :], axis=1) + tl.load(hidden_bias + i_n, mask=m_n, other=0.0)
                # gelu: b_x (1 + tanh(u)) / 2 is b_x / (1 + exp(-2 u))
                b_x = b_x / (1.0 + tl.exp((b_x + 0.044715 * b_x * b_x * b_x) * SLOPE))
                total += tl.sum(b_x * tl.load(output + i_n, mask=m_n, other=0.0))
            tl.store(graded + i_b * K + i_k, total)


def grade_rows(slots: Slots, fresh: Tensor, query_position: Tensor) -> Tensor:
    """graded [B, K] of the rows that a decode step has just written into slot `fresh` [B, G]."""
    assert slots.network is not None
    (B, K, S, D), G, DV = slots.keys.shape, slots.position.shape[1], slots.values.shape[-1]
    network = slots.network.on(slots.keys.device).of(slots.shards)
    rope, graded = network.rope, torch.empty(B, K, dtype=torch.float32, device=slots.keys.device)
    rotated = {"F": 0, "START": 0, "NEIGHBOURS": False}
    if rope is not None:
        rotated = {"F": len(rope.frequency), "START": rope.start, "NEIGHBOURS": rope.interleaved}
    grade_kernel[(B, K)](
        slots.keys, slots.values, slots.key_scale, slots.value_scale, fresh, query_position,
        None if rope is None else rope.frequency, network.mean, network.scale, network.hidden, network.hidden_bias,
        network.output, network.output_bias, graded, K=K, G=G, S=S, D=D, DV=DV, N=network.output.shape[1],
        BN=HIDDEN, **rotated, num_warps=GRADE_WARPS,
    )  # fmt: skip
    return graded
