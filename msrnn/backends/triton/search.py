"""The search of a recall on a GPU: which archived tokens the queries of a block would attend to most.

Scores of all tokens and what ranks them, by three launches; `selection.py` has the first ones. A search reads the 8-bit
copies of all keys on the device, and finds them by the addresses of their segments, in `table` [B, SEGMENTS, 3].
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn import recall
from msrnn.backends.triton.common import LEAST, cap_scores, width
from msrnn.backends.triton.selection import FAR, first_position, select_triton
from msrnn.core import paged_slots
from msrnn.core.guests import find_held
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.scores import Scoring

SEGMENT, TILE = tl.constexpr(recall.SEGMENT), tl.constexpr(paged_slots.TILE)
INDEX, INDEX_SCALE = tl.constexpr(paged_slots.INDEX), tl.constexpr(paged_slots.INDEX_SCALE)
FIELDS = tl.constexpr(len(paged_slots.FIELDS))
ALIGNED = tl.constexpr(16)  # bytes: the memory of segments begins at multiples of more
UNREAD = tl.constexpr(-1.0e30)  # the score of a token that was not read yet
HELD = tl.constexpr(-2.0e30)  # the score of a held token with the first query
PROGRAMS = 2048  # score tokens, if there are enough of them
ROWS, TOKENS = 64, 64  # queries and tokens that are scored at once
SUMS = 2**13  # that are added up at once
SCORES = 2**28  # that there is room for; more KV heads are ranked one after the other
LEAST_BYTES = 32  # of a matrix product on tensor cores
RANKED, MARKED = 1024, 2048  # numbers of tokens that are ranked, and of held ones that are marked, together


@triton.jit
def locate(p_table, field: tl.constexpr, like, mask=None):
    """The addresses in a field of some lines of a table, as pointers of the type of `like`.

    Without a word on their alignment, rows would be read and written number by number.
    """
    return tl.multiple_of(
        tl.load(p_table + field, mask=mask, other=None if mask is None else 0).to(like.dtype), ALIGNED
    )


@triton.jit
def _count_read(p_position, T):
    """The tokens before T columns; 0 where all are padding, since nothing is searched for then."""
    first = first_position(p_position, T)
    return tl.where(first == FAR, 0, first)


@triton.jit
def _split(b_q):
    """Queries [BQ, D] as two bytes per number and a scale [BQ]: b_q is about (256 * high + low) * scale.

    16 bits of the largest number of each query: what rounding a query to bfloat16 loses is more.
    """
    b_scale = tl.maximum(tl.max(tl.abs(b_q), axis=1), 1e-30) / (127 * 256)
    b_scaled = b_q / b_scale[:, None]
    b_whole = (b_scaled + tl.where(b_scaled < 0, -0.5, 0.5)).to(tl.int32)
    b_high = (b_whole + 128) >> 8
    return b_high.to(tl.int8), (b_whole - b_high * 256).to(tl.int8), b_scale


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
    read = _count_read(position + i_b * T, T)
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
            b_high, b_low, b_query_scale = _split(b_q.to(tl.float32))
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
    scores, log_sums, position, shares, tops, before,
    K: tl.constexpr, R: tl.constexpr, T: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The largest mean attention of R heads over T queries to each token of some tiles, and the largest of each tile.

    Held tokens, and those that were not read, have -1.
    """
    first, i_part = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64)
    i_head = before + i_part
    o_n = first + tl.arange(0, BN)
    read = _count_read(position + i_head // K * T, T)
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
    tl.store(shares + i_head * N + o_n, b_share)
    o_tile = first // TILE + tl.arange(0, BN // TILE)
    tl.store(tops + i_head * (N // TILE) + o_tile, tl.max(tl.reshape(b_share, [BN // TILE, TILE]), axis=1))


def search_triton(slots: PagedSlots, query: Tensor, key: Tensor, position: Tensor, scoring: Scoring) -> Tensor:
    """The guests [B, K, n] of a block of each sequence, as `select_kernel` places them; see `find_guests`.

    query [B, H, T, D] and position [B, T] are contiguous; key [B, K, T, D]
    """
    (B, H, T, _), K, N = query.shape, key.shape[1], slots.segments * recall.SEGMENT
    exact = partial(torch.empty, dtype=torch.float32, device=query.device)
    shares, tops = exact(B, K, N), exact(B, K, N // paged_slots.TILE)
    heads = max(1, min(B * K, SCORES // (H // K * T * N)))
    held = _find_held(slots, position)
    for before in range(0, B * K, heads):
        part = slice(before, min(before + heads, B * K))
        _rank(slots, query, key, position, held, scoring, part, shares, tops)
    return select_triton(shares, tops, position, slots.guest_position)


def _rank(
    slots: PagedSlots, query: Tensor, key: Tensor, position: Tensor, held: Tensor, scoring: Scoring, part: slice,
    shares: Tensor, tops: Tensor,
) -> None:  # fmt: skip
    """Write the shares of all tokens for some KV heads of all sequences, and the largest of each tile."""
    (_, H, T, D), (_, K, N), (_, G, S) = query.shape, shares.shape, slots.position.shape
    exact = partial(torch.empty, dtype=torch.float32, device=query.device)
    Q, heads = H // K * T, part.stop - part.start
    split = Q <= LEAST and query.dtype != torch.float32 and D >= LEAST_BYTES
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
        scores, log_sums, position, shares, tops, part.start,
        K=K, R=H // K, T=T, N=N, BT=block, BN=ranked, num_warps=4 if block == 1 else 1,
    )  # fmt: skip


def _find_span(heads: int, tokens: int) -> int:
    """The tokens that one program scores, at most a segment: enough programs for the GPU, and no more than needed."""
    most = max(1, heads * tokens // PROGRAMS)
    return min(recall.SEGMENT, max(TOKENS, 1 << (most.bit_length() - 1)))


def index_types(slots: PagedSlots) -> tuple[Tensor, Tensor]:
    """Tensors whose pointers have the types of the 8-bit keys and of their scales: the table itself has neither."""
    return slots.table.view(torch.int8), slots.table.view(torch.bfloat16)


def _find_held(slots: PagedSlots, position: Tensor) -> Tensor:
    if slots.bound.window is None:
        return slots.position
    return find_held(slots, torch.where(position >= 0, position, 2**31 - 1).amin(-1))
