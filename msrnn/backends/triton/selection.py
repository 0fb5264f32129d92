"""The tokens with the largest shares of a search on a GPU, at the places of the guests: one launch for all KV heads."""

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
CHUNK = 2048  # numbers that are looked at together
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
def _load_keys(p_values, o_n, n):
    """Shares as whole numbers of the same order: the bits of a float that is not negative; -1 for none."""
    b_value = tl.load(p_values + o_n, mask=o_n < n, other=-1.0)
    return tl.where(b_value < 0, -1, b_value.to(tl.int32, bitcast=True))


@triton.jit
def _find_threshold(p_values, n, count, CHUNK: tl.constexpr):
    """The count-th largest of n shares, as `_load_keys` orders them, and how many that equal it are among the first.

    Digit by digit, the highest first: how many shares have each digit, of those that have the digits found before.
    """
    o_digit, found = tl.arange(0, DIGITS), 0
    for shift in tl.static_range(24, -1, -8):
        b_counts = tl.zeros([DIGITS], tl.int32)
        for start in range(0, n, CHUNK):
            b_key = _load_keys(p_values, start + tl.arange(0, CHUNK), n)
            m_key = (b_key >= 0) & ((b_key >> shift) // DIGITS == found)
            b_counts += tl.histogram((b_key >> shift) & (DIGITS - 1), DIGITS, mask=m_key)
        b_from = tl.cumsum(b_counts, axis=0, reverse=True)
        if shift == 24:
            count = tl.minimum(count, tl.max(b_from))
        digit = tl.max(tl.where(b_from >= count, o_digit, 0))
        count -= tl.sum(tl.where(o_digit > digit, b_counts, 0))
        found = found * DIGITS + digit
    return found, count


@triton.jit
def _keep_first(p_values, p_names, p_kept, n, count, CHUNK: tl.constexpr):
    """Write the names of the first `count` of n shares to p_kept, in their order -> their number and the threshold.

    The name of the i-th is p_names[i]; i itself if that is None.
    """
    threshold, equal = _find_threshold(p_values, n, count, CHUNK)
    kept = 0
    for start in range(0, n, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        b_key = _load_keys(p_values, o_n, n)
        b_equal = (b_key == threshold).to(tl.int32)
        m_kept = (b_key > threshold) | ((b_equal > 0) & (tl.cumsum(b_equal, axis=0) <= equal))
        b_name = o_n if p_names is None else tl.load(p_names + o_n, mask=m_kept, other=0)
        b_kept = m_kept.to(tl.int32)
        tl.store(p_kept + kept + tl.cumsum(b_kept, axis=0) - 1, b_name, mask=m_kept)
        kept, equal = kept + tl.sum(b_kept), equal - tl.sum(b_equal)
    return kept, threshold


@triton.jit
def _select(shares, tops, tiles, values, names, chosen, N: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Write the positions of the COUNT tokens with the largest shares to `chosen`, in order -> how many there are.

    They are in the COUNT tiles with the largest tops, and none is less than the least of these tops, if there are so
    many. `tiles`, `values` and `names` are room for the tiles and tokens between.
    """
    count, threshold = _keep_first(tops, None, tiles, N // TILE, COUNT, CHUNK)
    threshold = tl.where(count < COUNT, 0, threshold)
    tl.debug_barrier()
    candidates = 0
    for start in range(0, count * TILE, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        m_n = o_n < count * TILE
        b_name = tl.load(tiles + o_n // TILE, mask=m_n, other=0) * TILE + o_n % TILE
        b_value = tl.load(shares + b_name, mask=m_n, other=-1.0)
        m_n = (b_value >= 0) & (b_value.to(tl.int32, bitcast=True) >= threshold)
        b_n = m_n.to(tl.int32)
        o_kept = candidates + tl.cumsum(b_n, axis=0) - 1
        tl.store(values + o_kept, b_value, mask=m_n)
        tl.store(names + o_kept, b_name, mask=m_n)
        candidates += tl.sum(b_n)
    tl.debug_barrier()
    count, _ = _keep_first(values, names, chosen, candidates, COUNT, CHUNK)
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


@triton.jit
def select_kernel(
    shares, tops, position, guest_position, tiles, values, names, chosen, places, T,
    K: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The new guests of a KV head, at their places; padding changes nothing. The rest is room for what is between."""
    i_head = tl.program_id(0).to(tl.int64)
    shares, tops, guests = shares + i_head * N, tops + i_head * (N // TILE), guest_position + i_head * COUNT
    tiles, chosen, places = tiles + i_head * COUNT, chosen + i_head * COUNT, places + i_head * COUNT
    values, names = values + i_head * COUNT * TILE, names + i_head * COUNT * TILE
    o_g = tl.arange(0, 2**STEPS)
    b_place = tl.full(o_g.shape, STAYS, tl.int32)
    if first_position(position + i_head // K * T, T) != FAR:
        count = _select(shares, tops, tiles, values, names, chosen, N, COUNT, CHUNK)
        b_place = _place(chosen, count, guests, tiles, names, COUNT, STEPS)
    tl.store(places + o_g, b_place, mask=o_g < COUNT)


def select_triton(shares: Tensor, tops: Tensor, position: Tensor, guests: Tensor, chunk: int = CHUNK) -> Tensor:
    """What becomes of the guests [B, K, n], as `select_kernel` places them.

    shares [B, K, N], tops [B, K, N / TILE]: the largest of each tile; position [B, T]
    """
    B, K, count = guests.shape
    whole = partial(torch.empty, dtype=torch.int32, device=shares.device)
    room, places = (B, K, count * paged_slots.TILE), whole(B, K, count)
    select_kernel[(B * K,)](
        shares, tops, position, guests,
        whole(B, K, count), torch.empty(room, device=shares.device), whole(*room), whole(B, K, count), places,
        position.shape[1],
        K=K, N=shares.shape[-1], COUNT=count, CHUNK=chunk, STEPS=(count - 1).bit_length(), num_warps=WARPS,
    )  # fmt: skip
    return places
