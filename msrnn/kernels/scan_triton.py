"""The eviction scan on a GPU: one program per sequence and group walks a chunk's rows; `scan_torch` is its reference.

Who is present, how important, and since when gone stays in registers from row to row; the attention of a row's heads is
taken tile by tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.policy import Bound
from msrnn.reference import HELD

FAR = tl.constexpr(HELD)
TILE = 2**14  # scores of one tile, heads by candidates


@triton.jit
def scan_kernel(
    scores,
    position,
    importance,
    query_position,
    sinks,
    evicted_at,
    decay,
    size,
    first,
    recent,
    window,
    C,
    N,
    G: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    OBSERVES: tl.constexpr,
    SLIDES: tl.constexpr,
    SINKS: tl.constexpr,
):
    i_b, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_n = tl.arange(0, BN)
    m_n = o_n < N
    p_group = (i_b * G + i_g) * N + o_n
    b_position = tl.load(position + p_group, mask=m_n, other=-1)
    b_importance = tl.zeros([BN], tl.float32)  # where nothing is observed, all tie, and ties go to the oldest
    if OBSERVES:
        b_importance = tl.load(importance + p_group, mask=m_n, other=0.0)
    b_evicted = tl.full([BN], FAR, tl.int32)
    m_present = b_position >= 0
    i = 0
    while i < C:
        t = tl.load(query_position + i_b * C + i)
        if SLIDES:
            m_expired = m_present & (b_position <= t - window)
            b_evicted = tl.where(m_expired, t - 1, b_evicted)
            m_present = m_present & (m_expired == 0)
        m_seen = m_present & (b_position <= t)
        b_observed = tl.zeros([BN], tl.float32)
        for start in range(0, M, BM):
            o_m = start + tl.arange(0, BM)
            m_m = o_m < M
            m_tile = m_m[:, None] & m_n[None, :]
            # [BM, BN]
            p_scores = scores + (((i_b * G + i_g) * M + o_m) * C + i)[:, None] * N + o_n[None, :]
            b_s = tl.load(p_scores, mask=m_tile & m_seen[None, :], other=float("-inf"))
            b_max = tl.max(b_s, axis=1)
            if SINKS:
                b_sink = tl.load(sinks + i_g * M + o_m, mask=m_m, other=0.0)
                b_max = tl.maximum(b_max, b_sink)
            # A row of padding sees nothing, and -inf - -inf is no number.
            b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
            b_e = tl.exp(b_s - b_max[:, None])
            b_sum = tl.sum(b_e, axis=1)
            if SINKS:
                b_sum += tl.exp(b_sink - b_max)
            b_a = b_e / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
            tl.store(p_scores, b_a, mask=m_tile)
            b_observed += tl.sum(b_a, axis=0)
        if OBSERVES:
            b_importance = tl.where(m_seen, decay * b_importance + b_observed / M, b_importance)
        m_free = m_seen & (b_position >= first) & (b_position <= t - recent)
        b_ranked = tl.where(m_free, b_importance, float("inf"))
        m_least = m_free & (b_ranked == tl.min(b_ranked))
        oldest = tl.min(tl.where(m_least, b_position, FAR))
        m_leaves = m_least & (b_position == oldest) & (tl.sum(m_seen.to(tl.int32)) > size)
        b_evicted = tl.where(m_leaves, t, b_evicted)
        m_present = m_present & (m_leaves == 0)
        i += 1
    tl.store(evicted_at + p_group, b_evicted, mask=m_n)
    tl.store(importance + p_group, b_importance, mask=m_n)


def scan_triton(
    scores: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    sinks: Tensor | None = None,
) -> Tensor:
    B, G, M, C, N = scores.shape
    evicted_at = torch.empty_like(position)
    candidates = triton.next_power_of_2(N)
    heads = min(triton.next_power_of_2(M), max(1, TILE // candidates))
    policy = bound.policy
    scan_kernel[(B, G)](
        scores, position.contiguous(), importance, query_position.contiguous(), sinks if sinks is not None else scores,
        evicted_at, policy.decay or 0.0, bound.size, policy.first, bound.recent, bound.window or 0, C, N,
        G=G, M=M, BM=heads, BN=candidates, OBSERVES=policy.decay is not None, SLIDES=bound.window is not None,
        SINKS=sinks is not None, num_warps=8,
    )  # fmt: skip
    return evicted_at
