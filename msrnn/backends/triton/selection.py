"""The first tokens of a search on a GPU, at the places of the guests: one launch for all KV heads, or for some of them.

A rank is a whole number: the larger, the more a token is attended to; -1 for one that cannot be a guest.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.core import paged_slots

TILE = tl.constexpr(paged_slots.TILE)
FAR = tl.constexpr(2**31 - 1)
DIGITS = tl.constexpr(256)  # of eight bits
STAYS = tl.constexpr(-2)  # a guest that is recalled again, at its place
CHUNK, FEW = 4096, 512  # ranks that are looked at together: of tiles and their tokens, and of those that are left
WARPS = 8


@triton.jit
def first_position(p_position, T):
    """The position of the first token among T columns: the number of tokens before it. FAR where all are padding."""
    least = FAR
    for start in range(0, T, 128):
        o_t = start + tl.arange(0, 128)
        b_t = tl.load(p_position + o_t, mask=o_t < T, other=-1)
        least = tl.minimum(least, tl.min(tl.where(b_t >= 0, b_t, FAR)))
    return least


@triton.jit
def _find_threshold(p_ranks, n, count, CHUNK: tl.constexpr):
    """The count-th largest of n ranks, and how many that equal it are among the first.

    Digit by digit, the highest first: how many ranks have each digit, of those that have the digits found before.
    """
    o_digit, found = tl.arange(0, DIGITS), 0
    for shift in tl.static_range(24, -1, -8):
        b_counts = tl.zeros([DIGITS], tl.int32)
        for start in range(0, n, CHUNK):
            o_n = start + tl.arange(0, CHUNK)
            b_rank = tl.load(p_ranks + o_n, mask=o_n < n, other=-1)
            m_rank = (b_rank >= 0) & ((b_rank >> shift) // DIGITS == found)
            b_counts += tl.histogram((b_rank >> shift) & (DIGITS - 1), DIGITS, mask=m_rank)
        b_from = tl.cumsum(b_counts, axis=0, reverse=True)
        if shift == 24:
            count = tl.minimum(count, tl.max(b_from))
        digit = tl.max(tl.where(b_from >= count, o_digit, 0))
        count -= tl.sum(tl.where(o_digit > digit, b_counts, 0))
        found = found * DIGITS + digit
    return found, count


@triton.jit
def _keep_first(p_ranks, p_names, p_kept, n, count, CHUNK: tl.constexpr):
    """Write the names of the first `count` of n ranks to p_kept, in their order -> their number and the threshold.

    The name of the i-th is p_names[i]; i itself if that is None.
    """
    threshold, equal = _find_threshold(p_ranks, n, count, CHUNK)
    kept = 0
    for start in range(0, n, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        b_rank = tl.load(p_ranks + o_n, mask=o_n < n, other=-1)
        b_equal = (b_rank == threshold).to(tl.int32)
        m_kept = (b_rank > threshold) | ((b_equal > 0) & (tl.cumsum(b_equal, axis=0) <= equal))
        b_name = o_n if p_names is None else tl.load(p_names + o_n, mask=m_kept, other=0)
        b_kept = m_kept.to(tl.int32)
        tl.store(p_kept + kept + tl.cumsum(b_kept, axis=0) - 1, b_name, mask=m_kept)
        kept, equal = kept + tl.sum(b_kept), equal - tl.sum(b_equal)
    return kept, threshold


@triton.jit
def _select(
    ranks, tops, tiles, left, names, chosen,
    N: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Write the positions of the COUNT tokens with the largest ranks to `chosen`, in order -> how many there are.

    They are in the COUNT tiles with the largest tops, and none is less than the least of these tops, if there are so
    many. `tiles`, `left` and `names` are room for the tiles and tokens between.
    """
    count, threshold = _keep_first(tops, None, tiles, N // TILE, COUNT, CHUNK)
    threshold = tl.where(count < COUNT, 0, threshold)
    tl.debug_barrier()
    candidates = 0
    for start in range(0, count * TILE, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        m_n = o_n < count * TILE
        b_name = tl.load(tiles + o_n // TILE, mask=m_n, other=0) * TILE + o_n % TILE
        b_rank = tl.load(ranks + b_name, mask=m_n, other=-1)
        m_n = (b_rank >= 0) & (b_rank >= threshold)
        b_n = m_n.to(tl.int32)
        o_kept = candidates + tl.cumsum(b_n, axis=0) - 1
        tl.store(left + o_kept, b_rank, mask=m_n)
        tl.store(names + o_kept, b_name, mask=m_n)
        candidates += tl.sum(b_n)
    tl.debug_barrier()
    count, _ = _keep_first(left, names, chosen, candidates, COUNT, FEW)
    tl.debug_barrier()
    return count


@triton.jit
def _place(chosen, count, guests, recalled, fresh, COUNT: tl.constexpr, STEPS: tl.constexpr):
    """What becomes of the guests at their places: STAYS, the position of a token that comes in, or -1 for none.

    Rows that stay are not moved, so only new ones have to be fetched. `recalled` and `fresh` are room for whether each
    of the `count` chosen tokens, which are in order, is a guest already, and for those that are not.
    """
    o_g = tl.arange(0, 2**STEPS)
    m_g, m_chosen = o_g < COUNT, o_g < count
    b_guest = tl.load(guests + o_g, mask=m_g, other=-1)
    tl.store(recalled + o_g, 0, mask=m_g)
    b_at = tl.zeros_like(b_guest)  # how many chosen tokens are before each guest
    for step in tl.static_range(STEPS, -1, -1):
        b_next = b_at + 2**step
        b_before = tl.load(chosen + b_next - 1, mask=b_next <= count, other=FAR)
        b_at = tl.where(b_before < b_guest, b_next, b_at)
    b_stays = (tl.load(chosen + b_at, mask=b_at < count, other=-1) == b_guest) & (b_guest >= 0)
    tl.debug_barrier()
    tl.store(recalled + b_at, 1, mask=b_stays)
    tl.debug_barrier()
    b_new = (m_chosen & (tl.load(recalled + o_g, mask=m_chosen, other=1) == 0)).to(tl.int32)
    tl.store(fresh + tl.cumsum(b_new, axis=0) - 1, tl.load(chosen + o_g, mask=m_chosen, other=0), mask=b_new > 0)
    tl.debug_barrier()
    m_free = m_g & (b_stays == 0)
    o_new = tl.cumsum(m_free.to(tl.int32), axis=0) - 1
    b_place = tl.load(fresh + o_new, mask=m_free & (o_new < tl.sum(b_new)), other=-1)
    return tl.where(b_stays, STAYS, b_place)


@triton.jit(do_not_specialize=["T", "before"])
def select_kernel(
    ranks, tops, position, guest_position, tiles, left, names, chosen, places, T, before,
    K: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The new guests of a KV head after the first `before`, at their places; padding changes nothing.

    `tiles` to `chosen` are room for what is between, of these heads alone.
    """
    i_part = tl.program_id(0).to(tl.int64)
    i_head = before + i_part
    ranks, tops, guests = ranks + i_head * N, tops + i_head * (N // TILE), guest_position + i_head * COUNT
    tiles, chosen, places = tiles + i_part * COUNT, chosen + i_part * COUNT, places + i_head * COUNT
    left, names = left + i_part * COUNT * TILE, names + i_part * COUNT * TILE
    o_g = tl.arange(0, 2**STEPS)
    b_place = tl.full(o_g.shape, STAYS, tl.int32)
    if first_position(position + i_head // K * T, T) != FAR:
        count = _select(ranks, tops, tiles, left, names, chosen, N, COUNT, CHUNK, FEW)
        b_place = _place(chosen, count, guests, tiles, names, COUNT, STEPS)
    tl.store(places + o_g, b_place, mask=o_g < COUNT)


def select_triton(
    ranks: Tensor, tops: Tensor, position: Tensor, guests: Tensor, places: Tensor, part: slice, chunk: int = CHUNK
) -> None:
    """Write what becomes of the guests [B, K, n] of some of the B * K heads to `places`, as `select_kernel` has it.

    ranks [B, K, N], tops [B, K, N / TILE]: the largest of each tile; position [B, T]
    """
    (_, K, count), heads = guests.shape, part.stop - part.start
    whole = partial(torch.empty, dtype=torch.int32, device=ranks.device)
    room = heads, count * paged_slots.TILE
    select_kernel[(heads,)](
        ranks, tops, position, guests, whole(heads, count), whole(*room), whole(*room), whole(heads, count), places,
        position.shape[1], part.start,
        K=K, N=ranks.shape[-1], COUNT=count, CHUNK=chunk, FEW=min(chunk, FEW), STEPS=(count - 1).bit_length(),
        num_warps=WARPS,
    )  # fmt: skip
