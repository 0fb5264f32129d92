"""Attention of one new token of a layer: the kernels of the first launch of a decode step.

The new token's rows are written on the way. Where the slots are split among programs, `combine_kernel` adds them up.
Index names: i_ indices, o_ offsets, p_ pointers, b_ blocks, m_ masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from msrnn.backends.triton.common import cap_scores, find_row, hide_earlier, hide_protected, weigh, width
from msrnn.backends.triton.grouped_codes import (
    attend_pairs,
    count_columns,
    join_outputs,
    load_scales,
    pair_query,
    score_pairs,
    split_outputs,
)
from msrnn.backends.triton.quantization import BIAS, Buffer, numbers, write
from msrnn.backends.triton.rope import load_rotated, load_rotations


class Query(NamedTuple):
    """The query heads of a program: rows [BR, BD] and, where keys are re-rotated, the re-rotated pairs [BR, BF]."""

    b_q: Any
    b_x: Any
    b_y: Any
    bias: Any  # what the bias of `numbers` adds to a score


class Softmax(NamedTuple):
    """The part of the slots seen so far: maxima and sums of exponentials [BR], outputs [BR, BV], all float32."""

    b_max: Any
    b_sum: Any
    b_o: Any
    b_bias: Any  # [BR]: what the bias of `numbers` has added to an output, in units of it


@triton.jit
def _products(b_rows, b_keys, HEADS: tl.constexpr, PRECISION: tl.constexpr):
    """[BR, BS] of [BR, n] with [BS, n], or with [BS, BR, n] where each row has keys of its own; all float32."""
    if HEADS > 1:
        b_s = tl.trans(tl.sum(b_rows[None, :, :] * b_keys, axis=2))
    elif b_rows.shape[0] == 1:
        b_s = tl.sum(b_rows * b_keys, axis=1)[None, :]
    else:
        b_s = tl.dot(b_rows, tl.trans(b_keys), input_precision=PRECISION)
    return b_s


@triton.jit
def _add_head_axis(b_x, HEADS: tl.constexpr):
    """[a, b], or [a, 1, b] where a program has several heads that have rows of their own."""
    return b_x[:, None, :] if HEADS > 1 else b_x


@triton.jit
def _locate_rows(rows, o_s, S: tl.constexpr, HEADS: tl.constexpr):
    """Pointers to the rows of slots that all heads of a program share, [BS, 1], or to those of each, [BS, HEADS, 1]."""
    o_row = _add_head_axis(o_s[:, None], HEADS)
    if HEADS > 1:
        o_row += tl.arange(0, HEADS)[None, :, None] * S
    return rows.p_rows + rows.i_row * rows.W + o_row * rows.W


@triton.jit
def _score_rotated(
    q, p_keys, p_rotations, o_s, m_s,
    F: tl.constexpr, START: tl.constexpr, NEIGHBOURS: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What F rotated pairs of dimensions add to the scores [BR, BS]; see `rope.py`."""
    o_f = tl.arange(0, width(F))
    b_cos, b_sin = load_rotations(p_rotations + o_s[:, None] * (2 * F), m_s[:, None], o_f[None, :], F)
    b_x, b_y = load_rotated(
        p_keys, _add_head_axis(b_cos, HEADS), _add_head_axis(b_sin, HEADS), _add_head_axis(m_s[:, None], HEADS),
        _add_head_axis(o_f[None, :], HEADS), F, START, NEIGHBOURS,
    )  # fmt: skip
    return _products(q.b_x, b_x, HEADS, PRECISION) + _products(q.b_y, b_y, HEADS, PRECISION)


@triton.jit
def _score(
    q, keys, p_rotations, o_s, scale, softcap, S: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, START: tl.constexpr, NEIGHBOURS: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [BR, BS] of a block of slots; arbitrary for empty slots, so that loads need not wait for positions."""
    m_s, o_d = o_s < S, keys.o_w
    m_d = o_d < D
    p_keys = _locate_rows(keys, o_s, S, HEADS)
    if F > 0:
        b_s = _score_rotated(q, p_keys, p_rotations, o_s, m_s, F, START, NEIGHBOURS, HEADS, PRECISION)
        m_d = m_d & ((o_d < START) | (o_d >= START + 2 * F))
    if 2 * F < D:
        m_k = _add_head_axis(m_s[:, None] & m_d[None, :], HEADS)
        b_k = tl.load(p_keys + _add_head_axis(o_d[None, :], HEADS), mask=m_k, other=0.0)
        if F > 0:
            b_s += _products(q.b_q.to(tl.float32), b_k.to(tl.float32), HEADS, PRECISION)
        elif q.b_q.shape[0] == 1:
            b_s = (tl.sum(q.b_q.to(tl.float32) * numbers(b_k), axis=1) - q.bias)[None, :]
        else:
            b_s = tl.dot(q.b_q, tl.trans(b_k.to(q.b_q.dtype)), input_precision=PRECISION)
    b_s *= scale
    if keys.p_scale is not None:
        b_s *= tl.load(keys.p_scale + keys.i_row + o_s, mask=m_s, other=0.0).to(tl.float32)[None, :]
    return cap_scores(b_s, softcap)


@triton.jit
def _attend(
    seen, b_s, values, o_s, m_held, S: tl.constexpr, HEADS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """Continue the softmax with the scores [BR, BS] of a block of slots."""
    b_max, b_sum, b_old, b_p = weigh(seen.b_max, seen.b_sum, b_s, m_held)
    if values.p_scale is not None:
        b_p *= tl.load(values.p_scale + values.i_row + o_s, mask=m_held, other=0.0).to(tl.float32)[None, :]
    m_v = _add_head_axis(m_held[:, None] & (values.o_w < values.W)[None, :], HEADS)
    b_v = tl.load(_locate_rows(values, o_s, S, HEADS) + _add_head_axis(values.o_w[None, :], HEADS), mask=m_v, other=0.0)
    b_bias = seen.b_bias
    if HEADS > 1:
        b_pv = tl.sum(tl.trans(b_p)[:, :, None] * b_v.to(tl.float32), axis=0)
    elif b_s.shape[0] == 1:
        b_pv = tl.sum(tl.trans(b_p) * numbers(b_v), axis=0)[None, :]
        b_bias = b_bias * b_old + tl.sum(b_p, axis=1)
    else:
        b_pv = tl.dot(b_p.to(DTYPE), b_v.to(DTYPE), input_precision=PRECISION)
    return Softmax(b_max, b_sum, seen.b_o * b_old[:, None] + b_pv, b_bias)


@triton.jit
def _attend_sink(seen, b_sink):
    """Continue the softmax with attention sinks [BR], which have no values."""
    b_max = tl.maximum(seen.b_max, b_sink)
    b_old = tl.exp(seen.b_max - b_max)
    return Softmax(b_max, seen.b_sum * b_old + tl.exp(b_sink - b_max), seen.b_o * b_old[:, None], seen.b_bias)


@triton.jit
def _share_of_sink(sink, top, total):
    """The part of a softmax that its sink takes: 0 for padding, whose maximum is -inf."""
    return tl.where(top == float("-inf"), 0.0, tl.exp(sink - top) / total)


@triton.jit
def _find_empty(p_position, sequences, t, S: tl.constexpr):
    """The first empty slot.

    Of size + 1 slots, at most size are held between steps. Where all are, the state is corrupt: it is S or more, and
    nothing may be written, so that no row of another sequence is touched.
    """
    ALL: tl.constexpr = triton.next_power_of_2(S)
    o_all = tl.arange(0, ALL)
    b_position = hide_earlier(tl.load(p_position + o_all, mask=o_all < S, other=0), sequences, t)
    return tl.min(tl.where(b_position < 0, o_all, ALL))


@triton.jit(do_not_specialize=["sink_b", "sink_h", "share_b", "share_h"])
def attend_kernel(
    query, key, value, keys, values, key_scale, value_scale, position, query_position, sinks, share, rotations,
    fresh, scores, maxima, sums, squares, output, sequences, sink_b, sink_h, share_b, share_h,
    protected, scale, softcap, window, spared, largest,
    SLIDING: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HEADS: tl.constexpr, PAIRED: tl.constexpr, BS: tl.constexpr, SPAN: tl.constexpr,
    F: tl.constexpr, START: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """The R query heads of one KV head, in one pass over its keys and values; raw scores are kept for the eviction.

    The new token's row goes into the first empty slot and is attended to from registers; `position` still calls the
    slot empty, so that every program finds the same one, and `fresh` [B, G] says which it is. With splits, a program
    sees SPAN slots, and leaves its part of the output, its maximum and its sum of exponentials; otherwise `maxima`
    gets logarithms of sums. With rotations, F pairs of dimensions are re-rotated, and scores are those of re-rotated
    rows. A program may then have several KV heads of one query head each, whose slots have the same rotations: these
    are read once for all heads. Scales, sinks, share, rotations, squares, sequences, protected, softcap and window may
    be None.
    """
    BR: tl.constexpr = HEADS if R == 1 else count_columns(R) if PAIRED else width(R)
    BD: tl.constexpr = 2 * width(D // 2) if PAIRED else width(D)
    BV: tl.constexpr = 2 * width(DV // 2) if PAIRED else width(DV)
    WHOLE: tl.constexpr = keys.dtype.element_ty == tl.int8
    SPLITS: tl.constexpr = triton.cdiv(S, SPAN)
    # Re-rotated rows are float32: tf32 has as many mantissa bits as 16-bit rows, or more.
    PRECISION: tl.constexpr = "ieee" if query.dtype.element_ty == tl.float32 else "tf32"
    # Heads of one sequence run side by side, so that what they share is in the cache: rotations and positions.
    i_program, i_s = tl.program_id(0), tl.program_id(1)
    i_b, i_k = (i_program // (K // HEADS)).to(tl.int64), i_program % (K // HEADS)
    i_kv, i_group = i_b * K + i_k * HEADS, i_b * G + i_k * HEADS * G // K
    i_h, i_p = i_kv * R, find_row(sequences, i_b)
    scale = tl.cast(scale, tl.float32)  # inside torch.compile, scalars come in double precision
    o_r, o_d, o_v = tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, BV)
    m_r, m_d, m_v = o_r < R * HEADS, o_d < D, o_v < DV
    t = tl.load(query_position + i_b)
    p_query, p_position, p_scores = query + (i_h + o_r[:, None]) * D, position, scores + (i_h + o_r) * S
    p_position += (i_p * G + i_k * HEADS * G // K) * S
    # [BR, BD]
    b_q = tl.load(p_query + o_d[None, :], mask=m_r[:, None] & m_d[None, :], other=0.0)
    p_rotations, b_x, b_y = None, None, None
    if F > 0:
        p_rotations, o_f = rotations + i_group * (S + 1) * (2 * F), tl.arange(0, width(F))
        b_cos, b_sin = load_rotations(p_rotations + S * (2 * F), t >= 0, o_f[None, :], F)
        b_x, b_y = load_rotated(p_query, b_cos, b_sin, m_r[:, None], o_f[None, :], F, START, NEIGHBOURS)
    bias = tl.sum(b_q.to(tl.float32)) * BIAS if WHOLE else 0.0
    q = pair_query(b_q, scale) if PAIRED else Query(b_q, b_x, b_y, bias)
    i_row = (i_p * K + i_k * HEADS) * S
    key_rows, value_rows = Buffer(keys, key_scale, i_row, o_d, D), Buffer(values, value_scale, i_row, o_v, DV)
    if sinks is not None:
        sinks = sinks + i_b * sink_b + (i_k * HEADS * R + o_r) * sink_h
    b_none = tl.zeros([BR], tl.float32)
    seen = Softmax(tl.full([BR], float("-inf"), tl.float32), b_none, tl.zeros([BR, BV], tl.float32), b_none)
    if t >= 0:
        if i_s == 0:
            slot, i_new = _find_empty(p_position, sequences, t, S), i_kv + tl.arange(0, HEADS)
            tl.store(fresh + i_group, slot)
            # [HEADS, BD], [HEADS, BV]
            b_k = tl.load(key + i_new[:, None] * D + o_d[None, :], mask=m_d[None, :], other=0.0)
            b_v = tl.load(value + i_new[:, None] * DV + o_v[None, :], mask=m_v[None, :], other=0.0)
            b_k, b_v = write(b_k, key_rows, slot, largest, S), write(b_v, value_rows, slot, largest, S)
            if squares is not None:
                tl.store(squares + i_new, tl.sum(b_v * b_v, axis=1))
            b_s = cap_scores(tl.sum(b_q.to(tl.float32) * b_k, axis=1) * scale, softcap)
            tl.store(p_scores + slot, b_s, mask=m_r & (slot < S))
            seen = Softmax(b_s, seen.b_sum + 1.0, seen.b_o + b_v, seen.b_bias)
            if sinks is not None:
                seen = _attend_sink(seen, tl.load(sinks, mask=m_r, other=0.0))
        if PAIRED:
            seen = split_outputs(seen)
            scales = load_scales(key_rows, value_rows, i_s * SPAN + tl.arange(0, BS), S)
        for start in range(0, SPAN, BS):
            o_s = i_s * SPAN + start + tl.arange(0, BS)
            b_position = hide_earlier(tl.load(p_position + o_s, mask=o_s < S, other=-1), sequences, t)
            m_held = b_position >= 0
            if window is not None:
                b_leaves = b_position if SLIDING else hide_protected(b_position, protected, i_p)
                m_held = m_held & ((b_leaves > t - window) | (b_leaves < spared) | (b_leaves < 0))
            if PAIRED:
                b_s = cap_scores(score_pairs(q, key_rows, scales, o_s, S), softcap)
            else:
                b_s = _score(
                    q, key_rows, p_rotations, o_s, scale, softcap, S, D, F, START, NEIGHBOURS, HEADS, PRECISION
                )  # fmt: skip
            tl.store(p_scores[:, None] + o_s[None, :], b_s, mask=m_r[:, None] & m_held[None, :])
            if PAIRED:
                ahead = load_scales(key_rows, value_rows, o_s + BS, S)
                seen = attend_pairs(seen, b_s, value_rows, scales, o_s, m_held, S)
                scales = ahead
            else:
                seen = _attend(seen, b_s, value_rows, o_s, m_held, S, HEADS, b_q.dtype, PRECISION)
        if PAIRED:
            seen = Softmax(seen.b_max, seen.b_sum, join_outputs(seen), b_none)
    b_o, m_o = seen.b_o, m_r[:, None] & m_v[None, :]
    if WHOLE and BR == 1:
        b_o -= (seen.b_bias * BIAS)[:, None]
    if SPLITS > 1:
        o_part = (i_h + o_r) * SPLITS + i_s
        tl.store(maxima + o_part, seen.b_max, mask=m_r)
        tl.store(sums + o_part, seen.b_sum, mask=m_r)
        tl.store(output + o_part[:, None] * DV + o_v[None, :], b_o, mask=m_o)
    else:
        b_sum = tl.where(t >= 0, seen.b_sum, 1.0)
        tl.store(maxima + i_h + o_r, seen.b_max + tl.log(b_sum), mask=m_r)
        tl.store(output + (i_h + o_r[:, None]) * DV + o_v[None, :], b_o / b_sum[:, None], mask=m_o)
        if share is not None:
            b_share = _share_of_sink(tl.load(sinks, mask=m_r, other=0.0), seen.b_max, b_sum)
            tl.store(share + i_b * share_b + (i_k * HEADS * R + o_r) * share_h, b_share, mask=m_r)


@triton.jit(do_not_specialize=["sink_b", "sink_h", "share_b", "share_h"])
def combine_kernel(
    maxima, sums, parts, log_sums, output, sinks, share, sink_b, sink_h, share_b, share_h,
    H: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One head's output from those of the splits, and the share of its sink where `share` is not None."""
    i_h = tl.program_id(0).to(tl.int64)
    o_p, o_v = tl.arange(0, triton.next_power_of_2(SPLITS)), tl.arange(0, width(DV))
    m_p, m_v = o_p < SPLITS, o_v < DV
    b_max = tl.load(maxima + i_h * SPLITS + o_p, mask=m_p, other=float("-inf"))
    b_sum = tl.load(sums + i_h * SPLITS + o_p, mask=m_p, other=0.0)
    top = tl.max(b_max)
    base = tl.where(top == float("-inf"), 0.0, top)
    b_share = tl.exp(b_max - base)
    total = tl.sum(b_sum * b_share)
    total = tl.where(total == 0, 1.0, total)
    # [BP, BV]
    b_parts = tl.load(
        parts + (i_h * SPLITS + o_p[:, None]) * DV + o_v[None, :], mask=m_p[:, None] & m_v[None, :], other=0.0
    )
    tl.store(log_sums + i_h, base + tl.log(total))
    tl.store(output + i_h * DV + o_v, tl.sum(b_parts * b_share[:, None], axis=0) / total, mask=m_v)
    if share is not None:
        i_b = i_h // H
        sink = tl.load(sinks + i_b * sink_b + i_h % H * sink_h)
        tl.store(share + i_b * share_b + i_h % H * share_h, _share_of_sink(sink, top, total))
