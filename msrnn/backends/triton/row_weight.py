"""The weights of new rows; the references are `row_weights` and `weight_network` of the core.

A learned weight needs two launches before a chunk's scan, and one beside a decode step's attention. A program runs the
network of one KV head on some rows, as the slots keep them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.common import EXACT, width
from msrnn.backends.triton.rope import find_rotation
from msrnn.core import row_weights, weight_network
from msrnn.core.quantization import Rows
from msrnn.core.slots import Slots

MOST_DEVIATION = tl.constexpr(weight_network.MOST_DEVIATION)
MOST_EXPONENT = tl.constexpr(weight_network.MOST_EXPONENT)
(SHIFT_1, FACTOR_1), (SHIFT_2, FACTOR_2), (SHIFT_3, _) = (map(tl.constexpr, pair) for pair in row_weights.SCRAMBLERS)
SLOPE = tl.constexpr(-2 * (2 / torch.pi) ** 0.5)  # of the exponent in gelu
HIDDEN = 16  # numbers of a hidden layer at once
TOGETHER = 16  # rows of a program, which share what it loads of the network; fewer rows have a program each
WARPS = {1: 4, TOGETHER: 2}  # of a program, by its rows
WEIGHTS = 64  # of a program that combines heads


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
def _load_rows(p_rows, p_scales, o_w, m_t, W):
    """Rows [BT, BW] as the slots keep them, float32."""
    b_rows = tl.load(p_rows[:, None] + o_w[None, :], mask=m_t[:, None] & (o_w >= 0) & (o_w < W), other=0.0)
    b_rows = b_rows.to(tl.float32)
    if p_scales is not None:
        b_rows *= tl.load(p_scales, mask=m_t, other=0.0).to(tl.float32)[:, None]
    return b_rows


@triton.jit
def _load_keys(
    p_rows, p_scales, o_d, t, m_t, frequency, D, F: tl.constexpr, START: tl.constexpr, NEIGHBOURS: tl.constexpr
):
    """Keys [BT, BD] as they were before the model rotated them at positions t [BT]."""
    b_keys = _load_rows(p_rows, p_scales, o_d, m_t, D)
    if F > 0:
        o_r = o_d - START
        m_r = (o_r >= 0) & (o_r < 2 * F)
        if NEIGHBOURS:
            o_f, m_second, apart = o_r // 2, o_r % 2 == 1, 1
        else:
            o_f, m_second, apart = tl.where(o_r >= F, o_r - F, o_r), o_r >= F, F
        o_other = tl.where(m_r, tl.where(m_second, o_d - apart, o_d + apart), -1)
        b_others = _load_rows(p_rows, p_scales, o_other, m_t, D)
        b_frequency = tl.load(frequency + o_f, mask=m_r, other=0.0)
        b_cos, b_sin = find_rotation((t.to(tl.float32)[:, None] * b_frequency[None, :]).to(tl.float64))
        b_keys = tl.where(m_r, b_keys * b_cos + tl.where(m_second, -b_others, b_others) * b_sin, b_keys)
    return b_keys


@triton.jit
def _standardise(b_rows, mean, scale, m_w):
    """The numbers of rows [BT, BW] as a network takes them; `mean` and `scale` are pointers [BW]."""
    b_mean, b_scale = tl.load(mean, mask=m_w, other=0.0), tl.load(scale, mask=m_w, other=1.0)
    return tl.where(m_w, _clamp((b_rows - b_mean) / b_scale, MOST_DEVIATION), 0.0)


@triton.jit
def _multiply(b_rows, b_h, BT: tl.constexpr):
    """Rows [BT, BW] times the inputs [BN, BW] of hidden numbers -> [BT, BN]"""
    if BT == 1:
        return tl.sum(b_rows * b_h, axis=1)[None, :]
    return tl.dot(b_rows, tl.trans(b_h), input_precision=EXACT)


@triton.jit(do_not_specialize=["C", "rows", "count"])
def grade_kernel(
    keys, values, key_scale, value_scale, k_b, k_h, k_t, v_b, v_h, v_t, fresh, position, frequency,
    mean, scale, hidden, hidden_bias, output, output_bias, graded, squares, C, rows, count,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    F: tl.constexpr, START: tl.constexpr, NEIGHBOURS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """graded [B, K, C]: what each KV head's network says of rows at position [B, C]; `count` is B times C. squares
    [B, K, C], or None: the squared norms of their values.

    These are C rows of `keys` and `values`, all of them, or where C is 1 and `fresh` [B, G] is given, one of `rows`;
    padding has none then. Scales of quantized rows [B, K, rows] may be None, and frequency where F is 0.
    """
    I: tl.constexpr = D + DV  # noqa: E741
    o_t, i_k = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1)
    m_t, i_b, o_row = o_t < count, (o_t // C).to(tl.int64), o_t % C
    t = tl.load(position + o_t, mask=m_t, other=-1)
    o_graded = (i_b * K + i_k) * C + o_row
    if fresh is not None:
        m_t = m_t & (t >= 0)
        o_row = tl.load(fresh + i_b * G + i_k * G // K, mask=m_t, other=rows)
        m_t = m_t & (o_row < rows)
    o_d, o_v, o_n = tl.arange(0, width(D)), tl.arange(0, width(DV)), tl.arange(0, BN)
    m_d, m_v = o_d < D, o_v < DV
    p_keys, p_values = keys + i_b * k_b + i_k * k_h + o_row * k_t, values + i_b * v_b + i_k * v_h + o_row * v_t
    p_key_scales, p_value_scales, o_scale = None, None, (i_b * K + i_k) * rows + o_row
    if key_scale is not None:
        p_key_scales, p_value_scales = key_scale + o_scale, value_scale + o_scale
    b_keys = _load_keys(p_keys, p_key_scales, o_d, t, m_t, frequency, D, F, START, NEIGHBOURS)
    b_values = _load_rows(p_values, p_value_scales, o_v, m_t, DV)
    if squares is not None:
        tl.store(squares + o_graded, tl.sum(b_values * b_values, axis=1), mask=m_t)
    p_mean, p_scale = mean + i_k * I, scale + i_k * I
    b_keys = _standardise(b_keys, p_mean + o_d, p_scale + o_d, m_d)
    b_values = _standardise(b_values, p_mean + D + o_v, p_scale + D + o_v, m_v)
    b_total = tl.zeros([BT], dtype=tl.float32) + tl.load(output_bias + i_k)
    for first in range(0, N, BN):
        i_n, m_n = i_k * N + first + o_n, first + o_n < N
        p_hidden = hidden + i_n[:, None] * I
        b_h = tl.load(p_hidden + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_x = _multiply(b_keys, b_h, BT)
        b_h = tl.load(p_hidden + D + o_v[None, :], mask=m_n[:, None] & m_v[None, :], other=0.0)
        b_x += _multiply(b_values, b_h, BT) + tl.load(hidden_bias + i_n, mask=m_n, other=0.0)
        # gelu: b_x (1 + tanh(u)) / 2 is b_x / (1 + exp(-2 u))
        b_x = b_x / (1.0 + tl.exp((b_x + 0.044715 * b_x * b_x * b_x) * SLOPE))
        b_total += tl.sum(b_x * tl.load(output + i_n, mask=m_n, other=0.0), axis=1)
    tl.store(graded + o_graded, b_total, mask=m_t)


@triton.jit(do_not_specialize=["C", "count"])
def weigh_kernel(graded, squares, alpha, weight, C, count, MEMBERS: tl.constexpr, BT: tl.constexpr):
    """weight [B, G, C], which are `count` numbers, from graded and squares [B, K, C]."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t, o_heads = o_t < count, (o_t // C).to(tl.int64) * MEMBERS * C + o_t % C
    b_said, b_square = tl.zeros([BT], dtype=tl.float32), tl.zeros([BT], dtype=tl.float32)
    for i in range(MEMBERS):
        b_said += tl.load(graded + o_heads + i * C, mask=m_t, other=0.0)
        b_square += tl.load(squares + o_heads + i * C, mask=m_t, other=0.0)
    tl.store(weight + o_t, combine_weight(b_square, b_said / MEMBERS, tl.load(alpha)), mask=m_t)


class Graded(NamedTuple):
    """What is computed of rows head by head."""

    graded: Tensor  # [B, K, C]: what the networks say
    squares: Tensor | None  # [B, K, C]: squared norms of the values


def grade_rows(
    slots: Slots, key: Rows, value: Rows, position: Tensor, fresh: Tensor | None = None, squares: bool = False
) -> Graded:
    """Grade rows [B, K, C, D] at position [B, C], contiguous; or, of rows [B, K, S, D], those in
    slot `fresh` [B, G].

    With `squares`, also the squared norms of their values.
    """
    assert slots.network is not None
    (B, K, rows, D), G, C = key.codes.shape, slots.position.shape[1], position.shape[1]
    network = slots.network.on(key.codes.device).of(slots.shards)
    rope, exact = network.rope, partial(torch.empty, B, K, C, dtype=torch.float32, device=key.codes.device)
    found = Graded(exact(), exact() if squares else None)
    rotated = {"F": 0, "START": 0, "NEIGHBOURS": False}
    if rope is not None:
        rotated = {"F": len(rope.frequency), "START": rope.start, "NEIGHBOURS": rope.interleaved}
    together = 1 if B * C < TOGETHER else TOGETHER
    grade_kernel[(triton.cdiv(B * C, together), K)](
        key.codes, value.codes, key.scale, value.scale, *key.codes.stride()[:3], *value.codes.stride()[:3],
        fresh, position, None if rope is None else rope.frequency, network.mean, network.scale, network.hidden,
        network.hidden_bias, network.output, network.output_bias, *found, C, rows, B * C,
        K=K, G=G, D=D, DV=value.codes.shape[-1], N=network.output.shape[1], BN=HIDDEN, BT=together, **rotated,
        num_warps=WARPS[together],
    )  # fmt: skip
    return found


def grade_token(slots: Slots, key: Tensor, value: Tensor, query_position: Tensor) -> Tensor:
    """graded [B, K, 1] of a decode step's rows [B, K, D], which the slots keep as they are; contiguous."""
    return grade_rows(slots, Rows(key[:, :, None], None), Rows(value[:, :, None], None), query_position[:, None]).graded


def grade_written(slots: Slots, fresh: Tensor, query_position: Tensor) -> Tensor:
    """graded [B, K, 1] of the rows that a decode step has just written into slot `fresh` [B, G]."""
    rows = Rows(slots.keys, slots.key_scale), Rows(slots.values, slots.value_scale)
    return grade_rows(slots, *rows, query_position[:, None], fresh).graded


def weigh_triton(slots: Slots, key: Rows, value: Rows, query_position: Tensor) -> Tensor | None:
    """`Slots.weigh` of the new rows [B, K, C, D] of a chunk, at query_position [B, C], contiguous."""
    if not slots.bound.policy.learned or slots.network is None:
        return slots.weigh(key, value, query_position[:, None])
    found = grade_rows(slots, key, value, query_position, squares=True)
    (B, K, C), groups = found.graded.shape, slots.position.shape[1]
    network = slots.network.on(found.graded.device)
    if slots.joint is not None:
        return network.combine(found.graded, value.dequantized(torch.float32), groups, slots.joint)
    weight = torch.empty(B, groups, C, dtype=torch.float32, device=found.graded.device)
    weigh_kernel[(triton.cdiv(weight.numel(), WEIGHTS),)](
        *found, network.alpha, weight, C, weight.numel(), MEMBERS=K // groups, BT=WEIGHTS, num_warps=1
    )
    return weight
