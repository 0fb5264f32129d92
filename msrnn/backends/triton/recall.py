"""Recall on a GPU, for all sequences of a batch: kernels that archive, search and gather. `core/guests.py` defines it.

Archived rows are in pinned memory of the host, or on the device, where 8-bit copies of all keys are as well: a search
reads only these. Kernels find them by the addresses of their segments, in `table` [B, SEGMENTS, 4]. Nothing is read
back, so a captured graph can be replayed until there are more segments than it ranks.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.common import LEAST, cap_scores, width
from msrnn.backends.triton.quantization import quantize
from msrnn.core import archive, paged_slots
from msrnn.core.guests import find_held
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.scores import Scoring

SEGMENT, TILE = tl.constexpr(archive.SEGMENT), tl.constexpr(paged_slots.TILE)
KEYS, VALUES = tl.constexpr(paged_slots.KEYS), tl.constexpr(paged_slots.VALUES)
INDEX, INDEX_SCALE = tl.constexpr(paged_slots.INDEX), tl.constexpr(paged_slots.INDEX_SCALE)
FAR = tl.constexpr(2**31 - 1)
UNREAD = tl.constexpr(-1.0e30)  # the score of a token that was not read yet
SPLITS = 128  # programs that score the tokens of one KV head
ROWS = 64  # queries at once


@triton.jit
def _locate(table, i_b, i_s, field: tl.constexpr, MOST: tl.constexpr):
    """The address of a segment."""
    return tl.load(table + (i_b * MOST + i_s) * 4 + field)


@triton.jit
def _first_position(p_position, T):
    """The position of the first token among T columns: the number of tokens before it. 0 where all are padding."""
    least = FAR
    for start in range(0, T, 128):
        o_t = start + tl.arange(0, 128)
        b_t = tl.load(p_position + o_t, mask=o_t < T, other=-1)
        least = tl.minimum(least, tl.min(tl.where(b_t >= 0, b_t, FAR)))
    return tl.where(least == FAR, 0, least)


@triton.jit(do_not_specialize=["T"])
def archive_kernel(
    key, value, position, table, keys, values, index, scales, k_b, k_h, k_t, v_b, v_h, v_t, T,
    K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MOST: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Write the rows of some tokens to their segments; `keys` to `scales` are pointers of the types of their fields."""
    i_b, i_k = tl.program_id(0).to(tl.int64) // K, tl.program_id(0) % K
    o_t, o_d, o_v = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, width(D)), tl.arange(0, width(DV))
    b_t = tl.load(position + i_b * T + o_t, mask=o_t < T, other=-1)
    m_t = b_t >= 0
    m_k, m_v = m_t[:, None] & (o_d < D)[None, :], m_t[:, None] & (o_v < DV)[None, :]
    b_k = tl.load(key + i_b * k_b + i_k * k_h + o_t[:, None] * k_t + o_d[None, :], mask=m_k, other=0.0)
    b_v = tl.load(value + i_b * v_b + i_k * v_h + o_t[:, None] * v_t + o_v[None, :], mask=m_v, other=0.0)
    p_table = table + (i_b * MOST + b_t // SEGMENT) * 4
    o_row = i_k * SEGMENT + b_t % SEGMENT
    p_keys = tl.load(p_table + KEYS, mask=m_t, other=0).to(keys.dtype)
    p_values = tl.load(p_table + VALUES, mask=m_t, other=0).to(values.dtype)
    p_index = tl.load(p_table + INDEX, mask=m_t, other=0).to(index.dtype)
    p_scales = tl.load(p_table + INDEX_SCALE, mask=m_t, other=0).to(scales.dtype)
    b_codes, b_scale = quantize(b_k, 127.0, True)
    tl.store(p_index[:, None] + (o_row[:, None] * D + o_d[None, :]), b_codes.to(tl.int8), mask=m_k)
    tl.store(p_scales[:, None] + o_row[:, None], b_scale.to(tl.bfloat16), mask=m_t[:, None])
    tl.store(p_keys[:, None] + (o_row[:, None] * D + o_d[None, :]), b_k, mask=m_k)
    tl.store(p_values[:, None] + (o_row[:, None] * DV + o_v[None, :]), b_v, mask=m_v)


@triton.jit
def _add_scores(b_max, b_sum, b_s):
    """Continue a maximum and a sum of exponentials [BQ] with scores [BQ, TILE]."""
    b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
    return b_new, b_sum * tl.exp(b_max - b_new) + tl.sum(tl.exp(b_s - b_new[:, None]), axis=1)


@triton.jit(do_not_specialize=["T"])
def score_kernel(
    query, key, position, table, index, scales, scores, maxima, sums, scale, softcap, k_b, k_h, k_t, T,
    K: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, MOST: tl.constexpr, N: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Scores of Q queries with all archived tokens, and the maximum and sum of exponentials of each part of them.

    The first part has the scores with the block's own T keys as well, which are not stored.
    """
    PRECISION: tl.constexpr = "ieee" if query.dtype.element_ty == tl.float32 else "tf32"
    i_head, i_split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    i_b, i_k = i_head // K, i_head % K
    scale = tl.cast(scale, tl.float32)
    read = _first_position(position + i_b * T, T)
    o_d, o_n = tl.arange(0, width(D)), tl.arange(0, TILE)
    for start in range(0, Q, BQ):
        o_q = start + tl.arange(0, BQ)
        m_q = o_q < Q
        p_q = query + (i_head * Q + o_q)[:, None] * D + o_d[None, :]
        b_q = tl.load(p_q, mask=m_q[:, None] & (o_d < D)[None, :], other=0.0)
        b_max, b_sum = tl.full([BQ], UNREAD, tl.float32), tl.zeros([BQ], tl.float32)
        if i_split == 0:
            for first in range(0, T, TILE):
                o_own = first + o_n
                p_k = key + i_b * k_b + i_k * k_h + o_own[:, None] * k_t + o_d[None, :]
                b_k = tl.load(p_k, mask=(o_own < T)[:, None] & (o_d < D)[None, :], other=0.0)
                b_s = cap_scores(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale, softcap)
                b_max, b_sum = _add_scores(b_max, b_sum, tl.where(o_own[None, :] <= (o_q % T)[:, None], b_s, UNREAD))
        for tile in range(i_split, N // TILE, splits):
            b_s = tl.full([BQ, TILE], UNREAD, tl.float32)
            o_t = o_n + tile * TILE
            if tile * TILE < read:
                i_s, o_row = tile // (SEGMENT // TILE), i_k * SEGMENT + o_t % SEGMENT
                m_n = o_t < read
                p_index = _locate(table, i_b, i_s, INDEX, MOST).to(index.dtype)
                p_scales = _locate(table, i_b, i_s, INDEX_SCALE, MOST).to(scales.dtype)
                m_k = m_n[:, None] & (o_d < D)[None, :]
                b_k = tl.load(p_index + (o_row[:, None] * D + o_d[None, :]), mask=m_k, other=0).to(b_q.dtype)
                b_scale = tl.load(p_scales + o_row, mask=m_n, other=0.0).to(tl.float32)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_scale[None, :] * scale
                b_s = tl.where(m_n[None, :], cap_scores(b_s, softcap), UNREAD)
                b_max, b_sum = _add_scores(b_max, b_sum, b_s)
            tl.store(scores + (i_head * Q + o_q)[:, None] * N + o_t[None, :], b_s, mask=m_q[:, None])
        o_part = (i_head * Q + o_q) * splits + i_split
        tl.store(maxima + o_part, b_max, mask=m_q)
        tl.store(sums + o_part, b_sum, mask=m_q)


@triton.jit
def share_kernel(
    scores, log_sums, held, position, shares, tops,
    K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, T: tl.constexpr, N: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The largest mean attention of R heads over T queries to each token of a tile, and the largest of the tile.

    Held tokens, and those that were not read, have -1.
    """
    i_head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_k = i_head // K, i_head % K
    o_n = tile * TILE + tl.arange(0, TILE)
    read = _first_position(position + i_b * T, T)
    b_share = tl.full([TILE], -1.0, tl.float32)
    if tile * TILE < read:
        for start in range(0, T, BT):
            o_t = start + tl.arange(0, BT)
            m_t = o_t < T
            b_mean = tl.zeros([BT, TILE], tl.float32)
            for r in range(0, R):
                o_q = i_head * (R * T) + r * T + o_t
                b_s = tl.load(scores + o_q[:, None] * N + o_n[None, :], mask=m_t[:, None], other=UNREAD)
                b_log_sum = tl.load(log_sums + o_q, mask=m_t, other=0.0)
                b_mean += tl.exp(b_s - b_log_sum[:, None])
            b_share = tl.maximum(b_share, tl.max(b_mean, axis=0) / R)
        b_held = tl.load(held + (i_b * G + i_k // (K // G)) * (N + 1) + o_n)
        b_share = tl.where((b_held != 0) | (o_n >= read), -1.0, b_share)
    tl.store(shares + i_head * N + o_n, b_share)
    tl.store(tops + i_head * (N // TILE) + tile, tl.max(b_share))


@triton.jit
def gather_kernel(
    chosen, table, guest_keys, guest_values, guest_position,
    K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MOST: tl.constexpr, COUNT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Copy chosen archived rows to the guests; -1 chooses none."""
    i_head = tl.program_id(0).to(tl.int64)
    i_b, i_k = i_head // K, i_head % K
    o_g, o_d, o_v = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, width(D)), tl.arange(0, width(DV))
    b_t = tl.load(chosen + i_head * COUNT + o_g, mask=o_g < COUNT, other=-1)
    m_t = b_t >= 0
    o_guest, o_row = i_head * COUNT + o_g, i_k * SEGMENT + b_t % SEGMENT
    p_table = table + (i_b * MOST + b_t // SEGMENT) * 4
    p_keys = tl.load(p_table + KEYS, mask=m_t, other=0).to(guest_keys.dtype)
    p_values = tl.load(p_table + VALUES, mask=m_t, other=0).to(guest_values.dtype)
    m_k, m_v = m_t[:, None] & (o_d < D)[None, :], m_t[:, None] & (o_v < DV)[None, :]
    b_k = tl.load(p_keys[:, None] + (o_row[:, None] * D + o_d[None, :]), mask=m_k, other=0.0)
    b_v = tl.load(p_values[:, None] + (o_row[:, None] * DV + o_v[None, :]), mask=m_v, other=0.0)
    m_g = (o_g < COUNT)[:, None]
    tl.store(guest_position + o_guest, b_t.to(tl.int32), mask=o_g < COUNT)
    tl.store(guest_keys + o_guest[:, None] * D + o_d[None, :], b_k, mask=m_g & (o_d < D)[None, :])
    tl.store(guest_values + o_guest[:, None] * DV + o_v[None, :], b_v, mask=m_g & (o_v < DV)[None, :])


def archive_triton(slots: PagedSlots, key: Tensor, value: Tensor, position: Tensor) -> None:
    """Append the rows [B, K, T, D] of tokens at positions [B, T], -1 where padding, to their archives."""
    (B, K, T, D), DV = key.shape, value.shape[-1]
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    archive_kernel[(B * K, triton.cdiv(T, LEAST))](
        key, value, position.contiguous(), slots.table, slots.guest_keys, slots.guest_values, *_index_types(slots),
        *key.stride()[:3], *value.stride()[:3], T,
        K=K, D=D, DV=DV, MOST=slots.table.shape[1], BT=LEAST, num_warps=4,
    )  # fmt: skip


def _index_types(slots: PagedSlots) -> tuple[Tensor, Tensor]:
    """Tensors whose pointers have the types of the 8-bit keys and of their scales: the table itself has neither."""
    return slots.table.view(torch.int8), slots.table.view(torch.bfloat16)


def recall_triton(slots: PagedSlots, query: Tensor, key: Tensor, position: Tensor, scoring: Scoring) -> None:
    """Let a block of tokens of each sequence recall its guests.

    query [B, H, T, D], key [B, K, T, D], position [B, T]
    """
    (B, K, count, D), DV = slots.guest_keys.shape, slots.guest_values.shape[-1]
    key = key if key.stride(-1) == 1 else key.contiguous()
    shares, tops = _rank_tokens(slots, query.contiguous(), key, position.contiguous(), scoring)
    # A token of the first `count` is in one of the first `count` tiles.
    tiles = tops.topk(count, sorted=False).indices
    inside = shares.view(B, K, -1, paged_slots.TILE).gather(2, tiles[..., None].expand(-1, -1, -1, paged_slots.TILE))
    best = inside.flatten(2).topk(count, sorted=False)
    tile = tiles.gather(2, best.indices // paged_slots.TILE)
    chosen = (tile * paged_slots.TILE + best.indices % paged_slots.TILE).masked_fill(best.values < 0, -1)
    gather_kernel[(B * K, triton.cdiv(count, LEAST))](
        chosen, slots.table, slots.guest_keys, slots.guest_values, slots.guest_position,
        K=K, D=D, DV=DV, MOST=slots.table.shape[1], COUNT=count, BT=LEAST, num_warps=4,
    )  # fmt: skip


def _rank_tokens(
    slots: PagedSlots, query: Tensor, key: Tensor, position: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """What recall ranks archived tokens by [B, K, N], and the largest of each tile; -1 where there is no guest."""
    (B, H, T, D), K, (_, G, _) = query.shape, slots.guest_keys.shape[1], slots.position.shape
    Q, N = H // K * T, slots.segments * archive.SEGMENT
    exact = partial(torch.empty, dtype=torch.float32, device=query.device)
    splits, rows = min(SPLITS, N // paged_slots.TILE), min(ROWS, max(LEAST, triton.next_power_of_2(Q)))
    scores, maxima, sums = exact(B, K, Q, N), exact(B, K, Q, splits), exact(B, K, Q, splits)
    score_kernel[(B * K, splits)](
        query, key, position, slots.table, *_index_types(slots), scores, maxima, sums, scoring.scale, scoring.softcap,
        *key.stride()[:3], T, K=K, D=D, Q=Q, MOST=slots.table.shape[1], N=N, BQ=rows, num_warps=4,
    )  # fmt: skip
    first = torch.where(position >= 0, position, 2**31 - 1).amin(-1)
    at = find_held(slots, first).long()
    held = torch.zeros(B, G, N + 1, dtype=torch.int8, device=query.device)
    held.scatter_(2, torch.where((at >= 0) & (at < N), at, N), 1)
    shares, tops = exact(B, K, N), exact(B, K, N // paged_slots.TILE)
    share_kernel[(B * K, N // paged_slots.TILE)](
        scores, (maxima + sums.log()).logsumexp(-1), held, position, shares, tops,
        K=K, G=G, R=H // K, T=T, N=N, BT=min(LEAST, triton.next_power_of_2(T)), num_warps=1,
    )  # fmt: skip
    return shares, tops
