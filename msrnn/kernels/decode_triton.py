"""One token of one layer on a GPU: append, attend, and observe-evict as three launches, in the slots themselves.

Nothing is read back, nothing depends on the length, and every shape is fixed, so a captured graph replays for ever.
`msrnn.decode.decode_torch` is the reference. Index names: i_ indices, o_ offsets, p_ pointers, b_ blocks, m_ masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.reference import HELD
from msrnn.scoring import Scoring
from msrnn.state import Slots

FAR = tl.constexpr(HELD)
SLOTS_PER_BLOCK, WARPS = 32, 1  # reads at 4.1 TB/s on an H200 (head size 128); two warps reach 2.5


@triton.jit
def append_kernel(
    key,
    value,
    keys,
    values,
    position,
    importance,
    query_position,
    window,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    G: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    REMEMBERS: tl.constexpr,
    SLIDES: tl.constexpr,
):
    """The new token goes into the first empty slot of its group; what it can no longer see leaves."""
    i_b, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.load(query_position + i_b)
    if t >= 0:
        o_s, o_d, o_v = tl.arange(0, BS), tl.arange(0, BD), tl.arange(0, BV)
        p_position = position + (i_b * G + i_g) * S
        b_position = tl.load(p_position + o_s, mask=o_s < S, other=FAR)
        slot = tl.min(tl.where(b_position < 0, o_s, BS))
        if SLIDES:
            tl.store(p_position + o_s, -1, mask=(b_position >= 0) & (b_position <= t - window))
        tl.store(p_position + slot, t)
        if REMEMBERS:
            tl.store(importance + (i_b * G + i_g) * S + slot, 0.0)
        for i in range(K // G):
            i_k = i_b * K + i_g * (K // G) + i
            b_key = tl.load(key + i_k * D + o_d, mask=o_d < D)
            b_value = tl.load(value + i_k * DV + o_v, mask=o_v < DV)
            tl.store(keys + (i_k * S + slot) * D + o_d, b_key, mask=o_d < D)
            tl.store(values + (i_k * S + slot) * DV + o_v, b_value, mask=o_v < DV)


@triton.jit
def attend_kernel(
    query,
    keys,
    values,
    position,
    query_position,
    sinks,
    scores,
    log_sums,
    output,
    scale,
    softcap,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The R query heads of one KV head, in one pass over its keys and values; raw scores are kept for who leaves."""
    i_b, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Inside torch.compile, scalars come in double precision.
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    i_h = (i_b * K + i_k) * R
    i_g = i_k * G // K
    o_r, o_d, o_v = tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, BV)
    m_r, m_d, m_v = o_r < R, o_d < D, o_v < DV
    t = tl.load(query_position + i_b)
    # [BR, BD]
    b_q = tl.load(query + (i_h + o_r[:, None]) * D + o_d[None, :], mask=m_r[:, None] & m_d[None, :], other=0.0)
    b_max = tl.full([BR], float("-inf"), tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    if SINKS:
        b_max = tl.load(sinks + i_k * R + o_r, mask=m_r, other=0.0)
        b_sum += 1.0
    b_o = tl.zeros([BR, BV], tl.float32)
    p_position = position + (i_b * G + i_g) * S
    p_keys, p_values = keys + (i_b * K + i_k) * S * D, values + (i_b * K + i_k) * S * DV
    if t >= 0:
        for start in range(0, S, BS):
            o_s = start + tl.arange(0, BS)
            m_s = o_s < S
            m_held = tl.load(p_position + o_s, mask=m_s, other=-1) >= 0
            # [BS, BD]
            b_k = tl.load(p_keys + o_s[:, None] * D + o_d[None, :], mask=m_s[:, None] & m_d[None, :], other=0.0)
            # [BR, BS]
            if BR == 1:
                b_s = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), axis=1)[None, :]
            else:
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            b_s *= scale
            if CAPPED:
                b_s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * b_s / softcap) + 1.0))
            tl.store(scores + (i_h + o_r[:, None]) * S + o_s[None, :], b_s, mask=m_r[:, None] & m_s[None, :])
            b_s = tl.where(m_held[None, :], b_s, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
            # Until a state was seen the maximum is -inf, and -inf - -inf is no number.
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_p = tl.exp(b_s - b_base[:, None])
            b_old = tl.exp(b_max - b_base)
            # [BS, BV]
            b_v = tl.load(p_values + o_s[:, None] * DV + o_v[None, :], mask=m_held[:, None] & m_v[None, :], other=0.0)
            if BR == 1:
                b_pv = tl.sum(tl.trans(b_p) * b_v.to(tl.float32), axis=0)[None, :]
            else:
                b_pv = tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
            b_o = b_o * b_old[:, None] + b_pv
            b_sum = b_sum * b_old + tl.sum(b_p, axis=1)
            b_max = b_new
        b_o = b_o / b_sum[:, None]
        tl.store(log_sums + i_h + o_r, b_max + tl.log(b_sum), mask=m_r)
    tl.store(output + (i_h + o_r[:, None]) * DV + o_v[None, :], b_o, mask=m_r[:, None] & m_v[None, :])


@triton.jit
def evict_kernel(
    scores,
    log_sums,
    position,
    importance,
    query_position,
    decay,
    size,
    first,
    recent,
    S: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    BS: tl.constexpr,
    OBSERVES: tl.constexpr,
    REMEMBERS: tl.constexpr,
):
    """The group's mean attention becomes importance, and the least important state that is not protected leaves.

    Without observation every importance is 0 and ties, which go to the oldest, are all there is.
    """
    i_b, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.load(query_position + i_b)
    if t >= 0:
        o_s = tl.arange(0, BS)
        p_position = position + (i_b * G + i_g) * S + o_s
        p_importance = importance + (i_b * G + i_g) * S + o_s
        b_position = tl.load(p_position, mask=o_s < S, other=-1)
        m_held = b_position >= 0
        b_importance = tl.zeros([BS], tl.float32)
        if OBSERVES:
            for i in range(M):
                i_h = (i_b * G + i_g) * M + i
                b_s = tl.load(scores + i_h * S + o_s, mask=m_held, other=float("-inf"))
                b_importance += tl.exp(b_s - tl.load(log_sums + i_h))
            b_importance = b_importance / M
        if REMEMBERS:
            b_importance += tl.cast(decay, tl.float32) * tl.load(p_importance, mask=m_held, other=0.0)
            tl.store(p_importance, b_importance, mask=m_held)
        m_free = m_held & (b_position >= first) & (b_position <= t - recent)
        b_ranked = tl.where(m_free, b_importance, float("inf"))
        m_least = m_free & (b_ranked == tl.min(b_ranked))
        oldest = tl.min(tl.where(m_least, b_position, FAR))
        if tl.sum(m_held.to(tl.int32)) > size:
            tl.store(p_position, -1, mask=m_least & (b_position == oldest))


def decode_triton(
    slots: Slots, query: Tensor, key: Tensor, value: Tensor, query_position: Tensor, scoring: Scoring
) -> Tensor:
    keys, values, position, importance, bound = slots.keys, slots.values, slots.position, slots.importance, slots.bound
    (B, K, R, D), DV, (_, G, S) = query.shape, value.shape[-1], position.shape
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    sinks, softcap = scoring.sinks_of(G), scoring.softcap
    scores = torch.empty(B, K * R, S, device=query.device)
    log_sums = torch.empty(B, K * R, device=query.device)
    output = torch.empty(B, K, R, DV, device=query.device, dtype=query.dtype)
    memory = importance if importance is not None else log_sums  # a pointer that is not followed
    # Sixteen is the least that the matrix units take.
    dims = {"D": D, "DV": DV, "BD": max(16, triton.next_power_of_2(D)), "BV": max(16, triton.next_power_of_2(DV))}
    remembers = importance is not None
    all_slots = triton.next_power_of_2(S)
    append_kernel[(B, G)](
        key, value, keys, values, position, memory, query_position, bound.window or 0,
        K=K, S=S, G=G, BS=all_slots, REMEMBERS=remembers, SLIDES=bound.window is not None, **dims,
    )  # fmt: skip
    attend_kernel[(B, K)](
        query, keys, values, position, query_position, sinks if sinks is not None else log_sums,
        scores, log_sums, output, scoring.scale, softcap or 1.0,
        K=K, S=S, G=G, R=R, BR=1 if R == 1 else max(16, triton.next_power_of_2(R)), BS=SLOTS_PER_BLOCK,
        CAPPED=softcap is not None, SINKS=sinks is not None, num_warps=WARPS, **dims,
    )  # fmt: skip
    evict_kernel[(B, G)](
        scores, log_sums, position, memory, query_position,
        bound.policy.decay or 0.0, bound.size, bound.policy.first, bound.recent,
        S=S, G=G, M=K * R // G, BS=all_slots, OBSERVES=bound.policy.decay is not None, REMEMBERS=remembers,
    )  # fmt: skip
    return output
