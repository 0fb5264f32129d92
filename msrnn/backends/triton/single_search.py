"""The ranks of all archived tokens for one query of each KV head, on a GPU.

The order of attention is that of scores, so that no exponential is needed, and no sum over all tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.common import LEAST, width
from msrnn.backends.triton.copied_keys import (
    FIELDS,
    INDEX,
    INDEX_SCALE,
    SEGMENT,
    index_types,
    locate,
    split_queries,
)
from msrnn.core import paged_slots
from msrnn.core.paged_slots import PagedSlots

TILE = tl.constexpr(paged_slots.TILE)
ROWS = tl.constexpr(LEAST)
MARKED, HELD = 4096, 1024  # tokens that one program marks, and held ones that it looks at together
SPAN, TOKENS = 1024, 128  # that one program scores, and that it scores at once
WARPS = 2


@triton.jit
def mark_kernel(held, marks, S: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr):
    """Mark those of BM tokens of a group that it holds."""
    i_group, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BM
    tl.store(marks + i_group * N + first + tl.arange(0, BM), tl.zeros([BM], tl.int8))
    tl.debug_barrier()
    for start in range(0, S, BS):
        o_s = start + tl.arange(0, BS)
        b_at = tl.load(held + i_group * S + o_s, mask=o_s < S, other=-1)
        m_at = (b_at >= first) & (b_at < first + BM)
        tl.store(marks + i_group * N + b_at, tl.full([BS], 1, tl.int8), mask=m_at)


@triton.jit(do_not_specialize=["before"])
def rank_kernel(
    query, position, table, index, scales, marks, ranks, tops, before,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr, N: tl.constexpr,
    SPAN: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The ranks of SPAN tokens of a segment for the query of a KV head after the first `before`.

    Both bytes of a query are rows of one matrix. A rank is a score as a whole number of the same order, without its
    last bit, so that no rank is negative.
    """
    i_head, begin = before + tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    end = begin + SPAN
    i_b, i_k = i_head // K, i_head % K
    i_group = i_b * G + i_k // (K // G)
    read = tl.load(position + i_b)
    o_d, o_n, o_q = tl.arange(0, width(D)), tl.arange(0, BN), tl.arange(0, ROWS)
    b_query = tl.load(query + i_head * D + o_d, mask=o_d < D, other=0.0)
    b_high, b_low, b_scale = split_queries(b_query[None, :].to(tl.float32))
    b_q = tl.where(o_q[:, None] == 0, b_high, tl.where(o_q[:, None] == 1, b_low, 0)).to(tl.int8)
    b_weight = tl.where(o_q == 0, 256.0, tl.where(o_q == 1, 1.0, 0.0)) * tl.max(b_scale)
    p_table = table + (i_b * MOST + begin // SEGMENT) * FIELDS
    p_index, p_scales = locate(p_table, INDEX, index), locate(p_table, INDEX_SCALE, scales)
    ranked = tl.minimum(end, tl.maximum(begin, tl.cdiv(read, BN) * BN))
    for first in tl.range(begin, ranked, BN, num_stages=2):
        o_t = first + o_n
        m_n, o_row = o_t < read, i_k * SEGMENT + o_t % SEGMENT
        m_k = m_n[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_index + (o_row[:, None] * D + o_d[None, :]), mask=m_k, other=0)
        b_products = tl.dot(b_q, tl.trans(b_k)).to(tl.float32)
        b_score = tl.sum(b_products * b_weight[:, None], axis=0)
        b_score *= tl.load(p_scales + o_row, mask=m_n, other=0.0).to(tl.float32)
        b_bits = b_score.to(tl.int32, bitcast=True)
        b_rank = ((b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)) >> 1) + 2**30
        b_rank = tl.where(m_n & (tl.load(marks + i_group * N + o_t) == 0), b_rank, -1)
        tl.store(ranks + i_head * N + o_t, b_rank)
        p_tops = tops + i_head * (N // TILE) + first // TILE + tl.arange(0, BN // TILE)
        tl.store(p_tops, tl.max(tl.reshape(b_rank, [BN // TILE, TILE]), axis=1))
    for first in range(ranked, end, TILE):  # their tops suffice: no token of such a tile is looked at
        tl.store(tops + i_head * (N // TILE) + first // TILE, -1)


def mark_held(held: Tensor, tokens: int) -> Tensor:
    """Marks [B * G, N] int8 of the first N tokens: 1 for those that are held [B, G, S]."""
    B, G, S = held.shape
    marks = torch.empty(B * G, tokens, dtype=torch.int8, device=held.device)
    marked = min(MARKED, tokens)
    mark_kernel[(B * G, tokens // marked)](held.contiguous(), marks, S=S, N=tokens, BM=marked, BS=HELD, num_warps=4)
    return marks


def rank_single(
    slots: PagedSlots, query: Tensor, position: Tensor, marks: Tensor, part: slice, ranks: Tensor, tops: Tensor
) -> None:
    """Write the ranks [B, K, N] of all tokens, and the largest of each tile, for some of the B * K heads.

    query [B, K, 1, D] and position [B, 1] are contiguous; padding, at -1, ranks nothing.
    """
    (B, K, N), D = ranks.shape, query.shape[-1]
    rank_kernel[(part.stop - part.start, N // SPAN)](
        query, position, slots.table, *index_types(slots), marks, ranks, tops, part.start,
        K=K, G=len(marks) // B, D=D, MOST=slots.table.shape[1], N=N, SPAN=SPAN, BN=TOKENS, num_warps=WARPS,
    )  # fmt: skip
