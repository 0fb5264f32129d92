"""The ranks of all archived tokens for the queries of a block, on a GPU: the most attention that one would pay to each.

Three launches: scores with maxima and sums, the sums of all, and shares.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn import recall
from msrnn.backends.triton.common import LEAST, cap_scores, width
from msrnn.backends.triton.copied_keys import (
    FIELDS,
    INDEX,
    INDEX_SCALE,
    SEGMENT,
    count_read,
    index_types,
    locate,
    split_queries,
    splits_queries,
)
from msrnn.core import paged_slots
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.scores import Scoring

TILE = tl.constexpr(paged_slots.TILE)
UNREAD = tl.constexpr(-1.0e30)  # the score of a token that was not read yet
HELD = tl.constexpr(-2.0e30)  # the score of a held token with the first query
PROGRAMS = 2048  # score tokens, if there are enough of them
ROWS, TOKENS = 64, 64  # queries and tokens that are scored at once
SUMS = 2**13  # that are added up at once
RANKED, MARKED = 1024, 2048  # numbers of tokens that are ranked, and of held ones that are marked, together


@triton.jit
def _add_scores(b_max, b_sum, b_s):
    """Continue maxima and sums of exponentials with scores [BQ, BN]: of each query [BQ, 1], or of each column apart.

    Apart, threads need not wait for each other.
    """
    if b_max.shape[1] > 1:
        b_new = tl.maximum(b_max, b_s)
        b_exp = tl.exp(b_s - b_new)
    else:
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1, keep_dims=True))
        b_exp = tl.sum(tl.exp(b_s - b_new), axis=1, keep_dims=True)
    return b_new, b_sum * tl.exp(b_max - b_new) + b_exp


@triton.jit(do_not_specialize=["T", "before"])
def score_kernel(
    query, key, position, table, index, scales, scores, maxima, sums, scale, softcap, k_b, k_h, k_t, T, before,
    K: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, MOST: tl.constexpr, N: tl.constexpr,
    SPAN: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Scores of Q queries with SPAN archived tokens of one segment, and their maxima and sums of exponentials.

    Scores are of the KV heads after the first `before`: as many as there is room for at once.

    The first program of a KV head adds the scores with the block's own T keys to these, and does not store them.
    """
    PRECISION: tl.constexpr = "ieee" if query.dtype.element_ty == tl.float32 else "tf32"
    i_part, i_span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_head = before + i_part
    i_b, i_k = i_head // K, i_head % K
    scale = tl.cast(scale, tl.float32)
    read = count_read(position + i_b * T, T)
    o_d, o_n = tl.arange(0, width(D)), tl.arange(0, BN)
    begin = i_span * SPAN
    end = tl.minimum(begin + SPAN, read)
    p_table = table + (i_b * MOST + begin // SEGMENT) * FIELDS
    p_index, p_scales = locate(p_table, INDEX, index), locate(p_table, INDEX_SCALE, scales)
    for start in range(0, Q, BQ):
        o_q = start + tl.arange(0, BQ)
        m_q = o_q < Q
        p_q = query + (i_head * Q + o_q)[:, None] * D + o_d[None, :]
        b_q = tl.load(p_q, mask=m_q[:, None] & (o_d < D)[None, :], other=0.0)
        b_max = tl.full([BQ, BN if SPLIT else 1], UNREAD, tl.float32)
        b_sum = tl.zeros_like(b_max)
        if i_span == 0:
            for first in tl.range(0, T, BN, num_stages=1):
                o_own = first + o_n
                p_k = key + i_b * k_b + i_k * k_h + o_own[:, None] * k_t + o_d[None, :]
                b_k = tl.load(p_k, mask=(o_own < T)[:, None] & (o_d < D)[None, :], other=0.0)
                b_s = cap_scores(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale, softcap)
                b_max, b_sum = _add_scores(b_max, b_sum, tl.where(o_own[None, :] <= (o_q % T)[:, None], b_s, UNREAD))
        if SPLIT:
            b_high, b_low, b_query_scale = split_queries(b_q.to(tl.float32))
        for first in range(begin, end, BN):
            o_t = first + o_n
            m_n, o_row = o_t < read, i_k * SEGMENT + o_t % SEGMENT
            m_k = m_n[:, None] & (o_d < D)[None, :]
            b_k = tl.trans(tl.load(p_index + (o_row[:, None] * D + o_d[None, :]), mask=m_k, other=0))
            b_scale = tl.load(p_scales + o_row, mask=m_n, other=0.0).to(tl.float32)
            if SPLIT:
                b_s = tl.dot(b_high, b_k).to(tl.float32) * 256 + tl.dot(b_low, b_k).to(tl.float32)
                b_s *= b_query_scale[:, None]
            else:
                b_s = tl.dot(b_q, b_k.to(b_q.dtype), input_precision=PRECISION)
            b_s *= b_scale[None, :] * scale
            b_s = tl.where(m_n[None, :], cap_scores(b_s, softcap), UNREAD)
            b_max, b_sum = _add_scores(b_max, b_sum, b_s)
            tl.store(scores + (i_part * Q + o_q)[:, None] * N + o_t[None, :], b_s, mask=m_q[:, None])
        o_part = (i_part * Q + o_q) * (N // SPAN) + i_span
        b_top = tl.max(b_max, axis=1)
        tl.store(maxima + o_part, b_top, mask=m_q)
        tl.store(sums + o_part, tl.sum(b_sum * tl.exp(b_max - b_top[:, None]), axis=1), mask=m_q)


@triton.jit(do_not_specialize=["before"])
def sum_kernel(
    maxima, sums, held, scores, log_sums, before,
    K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, N: tl.constexpr,
    SPANS: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The logarithm of each query's sum of exponentials; the first program of a KV head marks its held tokens."""
    i_part, i_q = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_q, o_p = i_q * BQ + tl.arange(0, BQ), tl.arange(0, SPANS)
    o_part, m_q = (i_part * Q + o_q)[:, None] * SPANS + o_p[None, :], o_q < Q
    b_max = tl.load(maxima + o_part, mask=m_q[:, None], other=UNREAD)
    b_top = tl.max(b_max, axis=1)
    b_sum = tl.sum(tl.load(sums + o_part, mask=m_q[:, None], other=0.0) * tl.exp(b_max - b_top[:, None]), axis=1)
    tl.store(log_sums + i_part * Q + o_q, b_top + tl.log(b_sum), mask=m_q)
    if i_q == 0:
        i_head = before + i_part
        i_group = i_head // K * G + i_head % K // (K // G)
        for start in range(0, S, BS):
            o_s = start + tl.arange(0, BS)
            b_at = tl.load(held + i_group * S + o_s, mask=o_s < S, other=-1)
            tl.store(scores + i_part * Q * N + b_at, HELD, mask=(b_at >= 0) & (b_at < N))


@triton.jit(do_not_specialize=["before"])
def share_kernel(
    scores, log_sums, position, ranks, tops, before,
    K: tl.constexpr, R: tl.constexpr, T: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The ranks of some tiles of tokens, and the largest of each tile: the bits of shares, which are not negative.

    A share is the largest mean attention of R heads over T queries. Held tokens, and those that were not read, have -1.
    """
    first, i_part = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64)
    i_head = before + i_part
    o_n = first + tl.arange(0, BN)
    read = count_read(position + i_head // K * T, T)
    b_share = tl.full([BN], -1.0, tl.float32)
    if first < read:
        for start in range(0, T, BT):
            o_t = start + tl.arange(0, BT)
            m_t = o_t < T
            b_mean = tl.zeros([BT, BN], tl.float32)
            for r in range(0, R):
                o_q = i_part * (R * T) + r * T + o_t
                b_s = tl.load(scores + o_q[:, None] * N + o_n[None, :], mask=m_t[:, None], other=UNREAD)
                b_log_sum = tl.load(log_sums + o_q, mask=m_t, other=0.0)
                b_mean += tl.exp(b_s - b_log_sum[:, None])
            b_share = tl.maximum(b_share, tl.max(b_mean, axis=0) / R)
        b_first = tl.load(scores + i_part * (R * T) * N + o_n)
        b_share = tl.where((b_first == HELD) | (o_n >= read), -1.0, b_share)
    b_rank = tl.where(b_share < 0, -1, b_share.to(tl.int32, bitcast=True))
    tl.store(ranks + i_head * N + o_n, b_rank)
    o_tile = first // TILE + tl.arange(0, BN // TILE)
    tl.store(tops + i_head * (N // TILE) + o_tile, tl.max(tl.reshape(b_rank, [BN // TILE, TILE]), axis=1))


def rank_block(
    slots: PagedSlots, query: Tensor, key: Tensor, position: Tensor, held: Tensor, scoring: Scoring, part: slice,
    ranks: Tensor, tops: Tensor,
) -> None:  # fmt: skip
    """Write the ranks [B, K, N] of all tokens, and the largest of each tile, for some of the B * K heads.

    query [B, H, T, D] and position [B, T] are contiguous; key [B, K, T, D]; held [B, G, S]
    """
    (_, H, T, D), (_, K, N), (_, G, S) = query.shape, ranks.shape, held.shape
    exact = partial(torch.empty, dtype=torch.float32, device=query.device)
    Q, heads = H // K * T, part.stop - part.start
    split = Q <= LEAST and splits_queries(query)
    rows, span = min(ROWS, max(LEAST, triton.next_power_of_2(Q))), _find_span(heads, N)
    spans = N // span
    scores, maxima, sums = exact(heads, Q, N), exact(heads, Q, spans), exact(heads, Q, spans)
    score_kernel[(heads, spans)](
        query, key, position, slots.table, *index_types(slots), scores, maxima, sums, scoring.scale, scoring.softcap,
        *key.stride()[:3], T, part.start,
        K=K, D=D, Q=Q, MOST=slots.table.shape[1], N=N, SPAN=span, BQ=rows, BN=TOKENS,
        SPLIT=split, num_warps=2 if split else 4,
    )  # fmt: skip
    log_sums, added = exact(heads, Q), max(1, min(LEAST, SUMS // spans))
    sum_kernel[(heads, triton.cdiv(Q, added))](
        maxima, sums, held, scores, log_sums, part.start,
        K=K, G=G, S=S, Q=Q, N=N, SPANS=spans, BQ=added, BS=min(MARKED, triton.next_power_of_2(S)), num_warps=4,
    )  # fmt: skip
    block = min(LEAST, triton.next_power_of_2(T))
    ranked = max(paged_slots.TILE, RANKED // block)
    share_kernel[(N // ranked, heads)](
        scores, log_sums, position, ranks, tops, part.start,
        K=K, R=H // K, T=T, N=N, BT=block, BN=ranked, num_warps=4 if block == 1 else 1,
    )  # fmt: skip


def _find_span(heads: int, tokens: int) -> int:
    """The tokens that one program scores, at most a segment: enough programs for the GPU, and no more than needed."""
    most = max(1, heads * tokens // PROGRAMS)
    return min(recall.SEGMENT, max(TOKENS, 1 << (most.bit_length() - 1)))
