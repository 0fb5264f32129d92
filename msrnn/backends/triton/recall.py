"""Recall by digests on a GPU, for all sequences of a batch: archive, search and gather as kernels.

Archived rows are in pinned memory of the host, or on the device. Kernels find them by the addresses of their segments,
in `table` [B, SEGMENTS, 4]: keys, values, and the least and the largest numbers of the keys of each page. Nothing is
read back, so a captured graph can be replayed until there are more pages than it ranks. `core/guests.py` is the
reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.common import LEAST, cap_scores, width
from msrnn.core import archive
from msrnn.core.paged_slots import HIGH, KEYS, LOW, VALUES, PagedSlots
from msrnn.core.scores import Scoring
from msrnn.recall import PAGE as PAGE_TOKENS

PAGE, SEGMENT = tl.constexpr(PAGE_TOKENS), tl.constexpr(archive.SEGMENT)
PAGES = tl.constexpr(archive.SEGMENT // PAGE_TOKENS)  # of a segment
NO_PAGE = tl.constexpr(-1.0e30)  # the score of a page that holds no token yet
FIELDS = tl.constexpr(4)
F_KEYS, F_VALUES, F_LOW, F_HIGH = (tl.constexpr(field) for field in (KEYS, VALUES, LOW, HIGH))
SPLITS = 32  # programs that score the pages of one KV head
ROWS = 64  # queries at once


@triton.jit
def _locate(table, i_b, i_s, field: tl.constexpr, pointer, MOST: tl.constexpr):
    """A pointer to a segment, of the type of another pointer."""
    return tl.load(table + (i_b * MOST + i_s) * FIELDS + field).to(pointer.dtype)


@triton.jit
def _first_position(p_position, T, BT: tl.constexpr):
    """The position of the first token among T columns: the number of tokens before it. 0 where all are padding."""
    least = 2147483647
    for start in range(0, T, BT):
        o_t = start + tl.arange(0, BT)
        b_t = tl.load(p_position + o_t, mask=o_t < T, other=-1)
        least = tl.minimum(least, tl.min(tl.where(b_t >= 0, b_t, 2147483647)))
    return tl.where(least == 2147483647, 0, least)


@triton.jit(do_not_specialize=["T"])
def archive_kernel(
    key, value, position, table, keys, values, k_b, k_h, k_t, v_b, v_h, v_t, T,
    K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MOST: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Write the rows of the tokens of one page to its segment, and extend the page's digest."""
    i_b, i_k, i_p = tl.program_id(0).to(tl.int64) // K, tl.program_id(0) % K, tl.program_id(1)
    p_position = position + i_b * T
    page = _first_position(p_position, T, 128) // PAGE + i_p
    i_s, first = page // PAGES, page * PAGE
    o_d, o_v = tl.arange(0, width(D)), tl.arange(0, width(DV))
    b_low = tl.full([width(D)], float("inf"), tl.float32)
    b_high = tl.full([width(D)], float("-inf"), tl.float32)
    written = 0
    for start in range(0, T, BT):
        o_t = start + tl.arange(0, BT)
        b_t = tl.load(p_position + o_t, mask=o_t < T, other=-1)
        m_t = (b_t >= first) & (b_t < first + PAGE)
        if tl.max(m_t.to(tl.int32)) > 0:
            p_keys, p_values = (
                _locate(table, i_b, i_s, F_KEYS, keys, MOST),
                _locate(table, i_b, i_s, F_VALUES, values, MOST),
            )
            o_row = i_k * SEGMENT + b_t % SEGMENT
            m_k, m_v = m_t[:, None] & (o_d < D)[None, :], m_t[:, None] & (o_v < DV)[None, :]
            b_k = tl.load(key + i_b * k_b + i_k * k_h + o_t[:, None] * k_t + o_d[None, :], mask=m_k, other=0.0)
            b_v = tl.load(value + i_b * v_b + i_k * v_h + o_t[:, None] * v_t + o_v[None, :], mask=m_v, other=0.0)
            tl.store(p_keys + o_row[:, None] * D + o_d[None, :], b_k, mask=m_k)
            tl.store(p_values + o_row[:, None] * DV + o_v[None, :], b_v, mask=m_v)
            b_x = b_k.to(tl.float32)
            b_low = tl.minimum(b_low, tl.min(tl.where(m_t[:, None], b_x, float("inf")), axis=0))
            b_high = tl.maximum(b_high, tl.max(tl.where(m_t[:, None], b_x, float("-inf")), axis=0))
            written += tl.sum(m_t.to(tl.int32))
    if written > 0:
        begun = _first_position(p_position, T, 128) > first  # earlier tokens of this page have a digest
        o_page = (i_k * PAGES + page % PAGES) * D + o_d
        p_low = _locate(table, i_b, i_s, F_LOW, keys, MOST) + o_page
        p_high = _locate(table, i_b, i_s, F_HIGH, keys, MOST) + o_page
        m_d = (o_d < D) & begun
        b_low = tl.minimum(b_low, tl.load(p_low, mask=m_d, other=float("inf")).to(tl.float32))
        b_high = tl.maximum(b_high, tl.load(p_high, mask=m_d, other=float("-inf")).to(tl.float32))
        tl.store(p_low, b_low, mask=o_d < D)
        tl.store(p_high, b_high, mask=o_d < D)


@triton.jit(do_not_specialize=["T"])
def score_pages_kernel(
    query, position, table, keys, scores, scale, softcap, T,
    K: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, MOST: tl.constexpr, SEGMENTS: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """The largest score that a key of each page could have with each of Q queries; softcap may be None."""
    PRECISION: tl.constexpr = "ieee" if query.dtype.element_ty == tl.float32 else "tf32"
    i_b, i_k = tl.program_id(0).to(tl.int64) // K, tl.program_id(0) % K
    scale = tl.cast(scale, tl.float32)
    pages = tl.cdiv(_first_position(position + i_b * T, T, 128), PAGE)
    o_d, o_p = tl.arange(0, width(D)), tl.arange(0, PAGES)
    for i_s in range(tl.program_id(1), SEGMENTS, tl.num_programs(1)):
        o_n = o_p + i_s * PAGES
        m_p = o_n < pages
        m_d = m_p[:, None] & (o_d < D)[None, :]
        b_low = tl.zeros([PAGES, width(D)], query.dtype.element_ty)
        b_high = tl.zeros([PAGES, width(D)], query.dtype.element_ty)
        if i_s * PAGES < pages:
            o_page = (i_k * PAGES + o_p)[:, None] * D + o_d[None, :]
            b_low = tl.load(_locate(table, i_b, i_s, F_LOW, keys, MOST) + o_page, mask=m_d, other=0.0)
            b_high = tl.load(_locate(table, i_b, i_s, F_HIGH, keys, MOST) + o_page, mask=m_d, other=0.0)
        for start in range(0, Q, BQ):
            o_q = start + tl.arange(0, BQ)
            p_q = query + (tl.program_id(0).to(tl.int64) * Q + o_q)[:, None] * D + o_d[None, :]
            b_q = tl.load(p_q, mask=(o_q < Q)[:, None] & (o_d < D)[None, :], other=0.0)
            b_positive, b_negative = tl.maximum(b_q, 0.0).to(b_q.dtype), tl.minimum(b_q, 0.0).to(b_q.dtype)
            b_s = tl.dot(b_positive, tl.trans(b_high), input_precision=PRECISION)
            b_s += tl.dot(b_negative, tl.trans(b_low), input_precision=PRECISION)
            b_s = tl.where(m_p[None, :], cap_scores(b_s * scale, softcap), NO_PAGE)
            o_s = (tl.program_id(0).to(tl.int64) * Q + o_q)[:, None] * (SEGMENTS * PAGES) + o_n[None, :]
            tl.store(scores + o_s, b_s, mask=(o_q < Q)[:, None])


@triton.jit
def gather_kernel(
    pages, held, table, guest_keys, guest_values, guest_position,
    K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MOST: tl.constexpr,
    COUNT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Copy the rows of one page to the guests, without those of tokens that are held; a page of -1 has none.

    `held` is True for held tokens, and for those that were not read, [B, G, S] with S the tokens of all pages.
    """
    i_head, i_p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_k = i_head // K, i_head % K
    page = tl.load(pages + i_head * COUNT + i_p).to(tl.int64)
    o_t, o_d, o_v = tl.arange(0, PAGE), tl.arange(0, width(D)), tl.arange(0, width(DV))
    exists = page >= 0
    page = tl.maximum(page, 0)
    b_held = tl.load(held + (i_b * G + i_k // (K // G)) * S + page * PAGE + o_t)
    m_t = exists & (b_held == 0)
    i_s, o_row = page // PAGES, i_k * SEGMENT + page % PAGES * PAGE + o_t
    o_guest = (i_head * COUNT + i_p) * PAGE + o_t
    tl.store(guest_position + o_guest, tl.where(m_t, page * PAGE + o_t, -1).to(tl.int32))
    if exists:
        m_k, m_v = m_t[:, None] & (o_d < D)[None, :], m_t[:, None] & (o_v < DV)[None, :]
        p_keys = _locate(table, i_b, i_s, F_KEYS, guest_keys, MOST)
        p_values = _locate(table, i_b, i_s, F_VALUES, guest_values, MOST)
        b_k = tl.load(p_keys + o_row[:, None] * D + o_d[None, :], mask=m_k, other=0.0)
        b_v = tl.load(p_values + o_row[:, None] * DV + o_v[None, :], mask=m_v, other=0.0)
        tl.store(guest_keys + o_guest[:, None] * D + o_d[None, :], b_k, mask=(o_d < D)[None, :])
        tl.store(guest_values + o_guest[:, None] * DV + o_v[None, :], b_v, mask=(o_v < DV)[None, :])


def archive_triton(slots: PagedSlots, key: Tensor, value: Tensor, position: Tensor) -> None:
    """Append the rows [B, K, T, D] of tokens at positions [B, T], -1 where padding, to their archives."""
    (B, K, T, D), DV = key.shape, value.shape[-1]
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    archive_kernel[(B * K, T // PAGE_TOKENS + 2)](
        key, value, position.contiguous(), slots.table, slots.guest_keys, slots.guest_values,
        *key.stride()[:3], *value.stride()[:3], T,
        K=K, D=D, DV=DV, MOST=slots.table.shape[1], BT=LEAST, num_warps=4,
    )  # fmt: skip


def recall_triton(slots: PagedSlots, query: Tensor, position: Tensor, scoring: Scoring) -> None:
    """Let a block of tokens of each sequence recall its guests: query [B, H, T, D], position [B, T]."""
    (B, H, T, D), (_, K, _, DV) = query.shape, slots.guest_values.shape
    (_, G, _), segments, position = slots.position.shape, slots.segments, position.contiguous()
    Q, pages = H // K * T, segments * archive.SEGMENT // PAGE_TOKENS
    scores = torch.empty(B, K, Q, pages, dtype=torch.float32, device=query.device)
    score_pages_kernel[(B * K, min(SPLITS, segments))](
        query.contiguous(), position, slots.table, slots.guest_keys, scores, scoring.scale, scoring.softcap, T,
        K=K, D=D, Q=Q, MOST=slots.table.shape[1], SEGMENTS=segments,
        BQ=min(ROWS, max(LEAST, triton.next_power_of_2(Q))), num_warps=4,
    )  # fmt: skip
    share = scores.softmax(-1).view(B, K, H // K, T, pages).mean(2).amax(2)
    held = mask_held_tokens(slots, position, pages * PAGE_TOKENS)
    full = held.view(B, G, pages, PAGE_TOKENS).all(-1).repeat_interleave(K // G, 1)
    found = share.masked_fill(full, -1.0).topk(slots.recall.pages)
    chosen = found.indices.masked_fill(found.values < 0, -1)
    gather_kernel[(B * K, slots.recall.pages)](
        chosen, held, slots.table, slots.guest_keys, slots.guest_values, slots.guest_position,
        K=K, G=G, S=held.shape[2], D=D, DV=DV, MOST=slots.table.shape[1], COUNT=slots.recall.pages, BS=LEAST,
        num_warps=4,
    )  # fmt: skip


def mask_held_tokens(slots: PagedSlots, position: Tensor, tokens: int) -> Tensor:
    """[B, G, tokens]: which of the first tokens of a text cannot be guests: they are held, or were not read before."""
    read = torch.where(position >= 0, position, 2**31 - 1).amin(-1)  # tokens before the first of the block
    read = torch.where(read == 2**31 - 1, 0, read)[:, None, None]
    held = torch.arange(tokens + 1, device=position.device) >= read
    held = held.expand(-1, slots.position.shape[1], -1).contiguous()
    at = slots.position.long()
    return held.scatter_(2, torch.where((at >= 0) & (at < tokens), at, tokens), True)[..., :tokens].contiguous()
