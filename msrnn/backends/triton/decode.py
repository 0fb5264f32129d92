"""A decode step of one layer on a GPU: append and attend, then observe and evict, as two launches on the slots.

Where sequences and heads are too few to fill the GPU, the slots are split among programs, and a third launch combines
them. Nothing is read back, and shapes do not depend on the length, so a captured graph can be replayed at any length.
`TorchBackend.decode` is the reference. Index names: i_ indices, o_ offsets, p_ pointers, b_ blocks, m_ masks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.common import at_once, width
from msrnn.backends.triton.evict import EVICT_WARPS, evict_kernel, heads_at_once, observe_kernel
from msrnn.backends.triton.quantization import BIAS, numbers, write
from msrnn.backends.triton.rope import load_rotated, load_rotations, rotations_of
from msrnn.core.quantization import LARGEST
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots


class Tile(NamedTuple):
    """What a program processes at once."""

    slots: int
    heads: int = 1  # with keys of their own, and the same rotations
    warps: int = 1
    stages: int = 3


PLAIN = Tile(32)
ROTATED = Tile(8, heads=2)  # where a query head has keys of its own
ROTATED_GROUPED = Tile(16)  # where several share them
PROGRAMS = 4096  # fill the GPU, at one warp each


@triton.jit
def _products(b_rows, b_keys, BR: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr):
    """[BR, BS] of [BR, n] with [BS, n], or with [BS, BR, n] where each row has keys of its own; all float32."""
    if HEADS > 1:
        b_s = tl.trans(tl.sum(b_rows[None, :, :] * b_keys, axis=2))
    elif BR == 1:
        b_s = tl.sum(b_rows * b_keys, axis=1)[None, :]
    else:
        b_s = tl.dot(b_rows, tl.trans(b_keys), input_precision=PRECISION)
    return b_s


@triton.jit
def _lifted(b_x, HEADS: tl.constexpr):
    """[a, b], or [a, 1, b] where a program has several heads that have rows of their own."""
    return b_x[:, None, :] if HEADS > 1 else b_x


@triton.jit
def attend_kernel(
    query,
    key,
    value,
    keys,
    values,
    key_scale,
    value_scale,
    position,
    query_position,
    sinks,
    rotations,
    fresh,
    scores,
    log_sums,
    sums,
    squares,
    output,
    scale,
    softcap,
    window,
    spared,
    largest,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    F: tl.constexpr,
    BF: tl.constexpr,
    START: tl.constexpr,
    ALL: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    SLIDES: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WHOLE: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    WEIGHS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The R query heads of one KV head, in one pass over its keys and values; raw scores are kept for the eviction.

    The new token's row goes into the first empty slot and is attended to from registers; `position` still calls the
    slot empty, so that every program finds the same one, and `fresh` [B, G] says which it is. With splits, a program
    sees SPAN slots, and leaves its part of the output, its maximum and its sum of exponentials. Where F > 0 pairs
    of dimensions are re-rotated, scores are those of re-rotated rows. A program may then have several KV heads of one
    query head each, whose slots have the same rotations: these are read once for all heads.
    """
    # Heads of one sequence run side by side, so that what they share is in the cache: rotations and positions.
    i_program, i_s = tl.program_id(0), tl.program_id(1)
    i_b, i_k = (i_program // (K // HEADS)).to(tl.int64), i_program % (K // HEADS)
    # Inside torch.compile, scalars come in double precision.
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    i_kv, i_g = i_b * K + i_k * HEADS, i_k * HEADS * G // K
    i_h = i_kv * R
    o_r, o_n, o_d, o_v = tl.arange(0, BR), tl.arange(0, HEADS), tl.arange(0, BD), tl.arange(0, BV)
    m_r, m_d, m_v = o_r < R * HEADS, o_d < D, o_v < DV
    t = tl.load(query_position + i_b)
    # [BR, BD]
    b_q = tl.load(query + (i_h + o_r[:, None]) * D + o_d[None, :], mask=m_r[:, None] & m_d[None, :], other=0.0)
    b_max = tl.full([BR], float("-inf"), tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    b_o = tl.zeros([BR, BV], tl.float32)
    # What the bias of `numbers` adds to a score, and to an output.
    q_bias = tl.sum(b_q.to(tl.float32)) * BIAS if WHOLE else 0.0
    b_bias = tl.zeros([BR], tl.float32)
    p_position = position + (i_b * G + i_g) * S
    p_keys, p_values = keys + i_kv * S * D, values + i_kv * S * DV
    m_plain = m_d  # dimensions that are not rotated
    if F > 0:
        o_f = tl.arange(0, BF)
        p_rotations = rotations + (i_b * G + i_g) * (S + 1) * (2 * F)
        q_cos, q_sin = load_rotations(p_rotations + S * (2 * F), t >= 0, o_f[None, :], F)
        b_x, b_y = load_rotated(
            query + (i_h + o_r[:, None]) * D, q_cos, q_sin, m_r[:, None], o_f[None, :], F, START, NEIGHBOURS
        )
        m_plain = m_d & ((o_d < START) | (o_d >= START + 2 * F))
    if t >= 0:
        if i_s == 0:
            o_all = tl.arange(0, ALL)
            # Of size + 1 slots, at most size are held between steps. Where all are, the state is corrupt: nothing is
            # written, and no row of another sequence is touched.
            slot = tl.min(tl.where(tl.load(p_position + o_all, mask=o_all < S, other=0) < 0, o_all, ALL))
            tl.store(fresh + i_b * G + i_g, slot)
            # [HEADS, BD], [HEADS, BV]
            i_new = i_kv + o_n[:, None]
            b_k = tl.load(key + i_new * D + o_d[None, :], mask=m_d[None, :], other=0.0)
            b_v = tl.load(value + i_new * DV + o_v[None, :], mask=m_v[None, :], other=0.0)
            i_row, m_row = i_new * S + slot, (i_new >= 0) & (slot < S)
            b_k = write(b_k, keys, key_scale, i_row, m_row, D, o_d[None, :], m_d[None, :], largest, QUANTIZED, WHOLE)
            b_v = write(
                b_v, values, value_scale, i_row, m_row, DV, o_v[None, :], m_v[None, :], largest, QUANTIZED, WHOLE
            )
            if WEIGHS:
                tl.store(squares + i_kv + o_n, tl.sum(b_v * b_v, axis=1))
            b_max = tl.sum(b_q.to(tl.float32) * b_k, axis=1) * scale
            if CAPPED:
                b_max = softcap * (1.0 - 2.0 / (tl.exp(2.0 * b_max / softcap) + 1.0))
            tl.store(scores + (i_h + o_r) * S + slot, b_max, mask=m_r & (slot < S))
            b_sum += 1.0
            b_o += b_v
            if SINKS:
                b_sink = tl.load(sinks + i_k * HEADS * R + o_r, mask=m_r, other=0.0)
                b_new = tl.maximum(b_max, b_sink)
                b_sum = tl.exp(b_max - b_new)
                b_o *= b_sum[:, None]
                b_sum += tl.exp(b_sink - b_new)
                b_max = b_new
        for start in range(0, SPAN, BS):
            o_s = i_s * SPAN + start + tl.arange(0, BS)
            m_s = o_s < S
            b_position = tl.load(p_position + o_s, mask=m_s, other=-1)
            m_held = b_position >= 0
            if SLIDES:
                m_held = m_held & ((b_position > t - window) | (b_position < spared))
            # Rows that all heads of a program share, [BS, 1], or those of each, [BS, HEADS, 1].
            o_row = _lifted(o_s[:, None], HEADS)
            if HEADS > 1:
                o_row += o_n[None, :, None] * S
            # [BR, BS]; scores of empty slots are arbitrary, so that the loads need not wait for the positions
            if F > 0:
                b_cos, b_sin = load_rotations(p_rotations + o_s[:, None] * (2 * F), m_s[:, None], o_f[None, :], F)
                b_kx, b_ky = load_rotated(
                    p_keys + o_row * D, _lifted(b_cos, HEADS), _lifted(b_sin, HEADS), _lifted(m_s[:, None], HEADS),
                    _lifted(o_f[None, :], HEADS), F, START, NEIGHBOURS,
                )  # fmt: skip
                b_s = _products(b_x, b_kx, BR, HEADS, PRECISION) + _products(b_y, b_ky, BR, HEADS, PRECISION)
            if 2 * F < D:
                m_k = _lifted(m_s[:, None] & m_plain[None, :], HEADS)
                b_k = tl.load(p_keys + o_row * D + _lifted(o_d[None, :], HEADS), mask=m_k, other=0.0)
                if F > 0:
                    b_s += _products(b_q.to(tl.float32), b_k.to(tl.float32), BR, HEADS, PRECISION)
                elif BR == 1:
                    b_s = (tl.sum(b_q.to(tl.float32) * numbers(b_k, WHOLE), axis=1) - q_bias)[None, :]
                else:
                    b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision=PRECISION)
            b_s *= scale
            if QUANTIZED:
                b_s *= tl.load(key_scale + i_kv * S + o_s, mask=m_s, other=0.0).to(tl.float32)[None, :]
            if CAPPED:
                b_s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * b_s / softcap) + 1.0))
            tl.store(scores + (i_h + o_r[:, None]) * S + o_s[None, :], b_s, mask=m_r[:, None] & m_held[None, :])
            b_s = tl.where(m_held[None, :], b_s, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
            # Until a state was seen the maximum is -inf, and -inf - -inf is NaN.
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_p = tl.exp(b_s - b_base[:, None])
            b_old = tl.exp(b_max - b_base)
            b_sum = b_sum * b_old + tl.sum(b_p, axis=1)
            if QUANTIZED:
                b_p *= tl.load(value_scale + i_kv * S + o_s, mask=m_held, other=0.0).to(tl.float32)[None, :]
            m_values = _lifted(m_held[:, None] & m_v[None, :], HEADS)
            b_v = tl.load(p_values + o_row * DV + _lifted(o_v[None, :], HEADS), mask=m_values, other=0.0)
            if HEADS > 1:
                b_pv = tl.sum(tl.trans(b_p)[:, :, None] * b_v.to(tl.float32), axis=0)
            elif BR == 1:
                b_pv = tl.sum(tl.trans(b_p) * numbers(b_v, WHOLE), axis=0)[None, :]
                b_bias = b_bias * b_old + tl.sum(b_p, axis=1)
            else:
                b_pv = tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), input_precision=PRECISION)
            b_o = b_o * b_old[:, None] + b_pv
            b_max = b_new
    if WHOLE and BR == 1:
        b_o -= (b_bias * BIAS)[:, None]
    m_o = m_r[:, None] & m_v[None, :]
    if SPLITS > 1:
        o_part = (i_h + o_r) * SPLITS + i_s
        tl.store(log_sums + o_part, b_max, mask=m_r)
        tl.store(sums + o_part, b_sum, mask=m_r)
        tl.store(output + o_part[:, None] * DV + o_v[None, :], b_o, mask=m_o)
    else:
        b_sum = tl.where(t >= 0, b_sum, 1.0)
        tl.store(log_sums + i_h + o_r, b_max + tl.log(b_sum), mask=m_r)
        tl.store(output + (i_h + o_r[:, None]) * DV + o_v[None, :], b_o / b_sum[:, None], mask=m_o)


@triton.jit
def combine_kernel(
    maxima, sums, parts, log_sums, output, DV: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, BP: tl.constexpr
):
    """One head's output from those of the splits."""
    i_h = tl.program_id(0).to(tl.int64)
    o_p, o_v = tl.arange(0, BP), tl.arange(0, BV)
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


def decode_triton(
    slots: Slots, query: Tensor, key: Tensor, value: Tensor, query_position: Tensor, scoring: Scoring
) -> Tensor:
    position, bound = slots.position, slots.bound
    (B, K, R, D), DV, (_, G, S) = query.shape, value.shape[-1], position.shape
    query, key, value, query_position = (t.contiguous() for t in (query, key, value, query_position))
    sinks, softcap, code = scoring.sinks_of(G), scoring.softcap, slots.state_dtype
    tile = PLAIN if scoring.repositioning is None else ROTATED if R == 1 else ROTATED_GROUPED
    heads = math.gcd(K // G, tile.heads) if code is None else 1
    block = tile.slots if R == 1 else at_once(tile.slots, max(D, DV), query.dtype)
    splits = max(1, min(triton.cdiv(S, block), PROGRAMS * heads // (B * K)))
    span = triton.cdiv(S, splits * block) * block
    splits = triton.cdiv(S, span)

    exact = partial(torch.empty, dtype=torch.float32, device=query.device)
    scores, log_sums, squares = exact(B, K * R, S), exact(B, K * R), exact(B, K)
    fresh = torch.empty(B, G, device=query.device, dtype=torch.int32)
    output = torch.empty(B, K, R, DV, device=query.device, dtype=query.dtype)
    maxima, sums, parts = log_sums, log_sums, output
    if splits > 1:
        maxima, sums = (exact(B, K * R, splits) for _ in range(2))
        parts = exact(B, K * R, splits, DV)
    # Placeholders: no kernel reads these pointers.
    memory, norm = (kept if kept is not None else log_sums for kept in (slots.importance, slots.norm))
    scales = [s if s is not None else log_sums for s in (slots.key_scale, slots.value_scale)]
    dims = {"D": D, "DV": DV, "BD": width(D), "BV": width(DV)}
    # Re-rotated rows are float32: tf32 has as many mantissa bits as 16-bit states, or more.
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    rotations, rotating = log_sums, {"F": 0, "BF": 1, "START": 0, "NEIGHBOURS": False, "PRECISION": precision}
    if scoring.repositioning is not None:
        rope = scoring.repositioning.rope
        pairs = len(rope.frequency)
        rotations = rotations_of(slots, query_position, scoring.repositioning)
        rotating |= {"F": pairs, "BF": width(pairs), "START": rope.start}
        rotating["NEIGHBOURS"] = rope.interleaved
    all_slots, slides, weighs = triton.next_power_of_2(S), bound.window is not None, bound.policy.value_norm
    attend_kernel[(B * (K // heads), splits)](
        query, key, value, slots.keys, slots.values, *scales, position, query_position,
        sinks if sinks is not None else log_sums, rotations, fresh, scores, maxima, sums, squares, parts,
        scoring.scale, softcap or 1.0, bound.window or 0, bound.spared, LARGEST[code] if code else 1.0,
        K=K, S=S, G=G, R=R, HEADS=heads, BR=heads if R == 1 else width(R), BS=block,
        ALL=all_slots, SPAN=span, SPLITS=splits, SLIDES=slides, QUANTIZED=code is not None, WHOLE=code == torch.int8,
        CAPPED=softcap is not None, SINKS=sinks is not None, WEIGHS=weighs, **dims, **rotating,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(B * K * R,)](
            maxima, sums, parts, log_sums, output,
            DV=DV, BV=dims["BV"], SPLITS=splits, BP=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
    observes, M, members = bound.policy.decay is not None, K * R // G, {"BK": triton.next_power_of_2(K // G)}
    heads_of = {"M": M, "BM": heads_at_once(M, all_slots)}
    observed = log_sums
    if slots.joint is not None:
        observed = exact(B, G, S + 1)
        observe_kernel[(B * G,)](
            scores, log_sums, squares, observed,
            S=S, **heads_of, MEMBERS=K // G, **members, BS=all_slots, OBSERVES=observes, WEIGHS=weighs,
            num_warps=EVICT_WARPS,
        )  # fmt: skip
        slots.joint.sum(observed)
        heads_of["M"] = M * slots.joint.count
    evict_kernel[(B, G)](
        fresh, scores, log_sums, position, memory, norm, squares, query_position, observed,
        bound.policy.decay or 0.0, bound.size, bound.policy.first, bound.recent, bound.window or 0, bound.spared,
        S=S, G=G, K=K, **heads_of, **members, BS=all_slots, OBSERVES=observes,
        REMEMBERS=slots.importance is not None, WEIGHS=weighs, SLIDES=slides, JOINT=slots.joint is not None,
        num_warps=EVICT_WARPS,
    )  # fmt: skip
    return output
