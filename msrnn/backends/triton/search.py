"""The search of a recall on a GPU: which archived tokens the queries of a block would attend to most.

Scores of all tokens, what ranks them, and the first ones, by four launches. A search reads the 8-bit copies of all keys
on the device, and finds them by the addresses of their segments, in `table` [B, SEGMENTS, 3].
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn import recall
from msrnn.backends.triton.common import LEAST, cap_scores, width
from msrnn.core import paged_slots
from msrnn.core.guests import find_held
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.scores import Scoring

SEGMENT, TILE = tl.constexpr(recall.SEGMENT), tl.constexpr(paged_slots.TILE)
INDEX, INDEX_SCALE = tl.constexpr(paged_slots.INDEX), tl.constexpr(paged_slots.INDEX_SCALE)
FIELDS = tl.constexpr(len(paged_slots.FIELDS))
ALIGNED = tl.constexpr(16)  # bytes: the memory of segments begins at multiples of more
FAR = tl.constexpr(2**31 - 1)
UNREAD = tl.constexpr(-1.0e30)  # the score of a token that was not read yet
HELD = tl.constexpr(-2.0e30)  # the score of a held token with the first query
DIGITS = tl.constexpr(256)  # of eight bits
STAYS = tl.constexpr(-2)  # a guest that is recalled again, at its place
PROGRAMS = 2048  # score tokens, if there are enough of them
ROWS, TOKENS = 64, 64  # queries and tokens that are scored at once
SUMS = 2**13  # that are added up at once
LEAST_BYTES = 32  # of a matrix product on tensor cores
RANKED, CHUNK = 1024, 2048  # numbers that are ranked, and that a selection looks at, together
WARPS = 8  # that select


@triton.jit
def locate(p_table, field: tl.constexpr, like, mask=None):
    """The addresses in a field of some lines of a table, as pointers of the type of `like`.

    Without a word on their alignment, rows would be read and written number by number.
    """
    return tl.multiple_of(
        tl.load(p_table + field, mask=mask, other=None if mask is None else 0).to(like.dtype), ALIGNED
    )


@triton.jit
def _first_position(p_position, T):
    """The position of the first token among T columns: the number of tokens before it. FAR where all are padding."""
    least = FAR
    for start in range(0, T, 128):
        o_t = start + tl.arange(0, 128)
        b_t = tl.load(p_position + o_t, mask=o_t < T, other=-1)
        least = tl.minimum(least, tl.min(tl.where(b_t >= 0, b_t, FAR)))
    return least


@triton.jit
def _count_read(p_position, T):
    """The tokens before T columns; 0 where all are padding, since nothing is searched for then."""
    first = _first_position(p_position, T)
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


@triton.jit(do_not_specialize=["T"])
def score_kernel(
    query, key, position, table, index, scales, scores, maxima, sums, scale, softcap, k_b, k_h, k_t, T,
    K: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, MOST: tl.constexpr, N: tl.constexpr,
    SPAN: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Scores of Q queries with SPAN archived tokens of one segment, and their maxima and sums of exponentials.

    The first program of a KV head adds the scores with the block's own T keys to these, and does not store them.
    """
    PRECISION: tl.constexpr = "ieee" if query.dtype.element_ty == tl.float32 else "tf32"
    i_head, i_span = tl.program_id(0).to(tl.int64), tl.program_id(1)
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
            tl.store(scores + (i_head * Q + o_q)[:, None] * N + o_t[None, :], b_s, mask=m_q[:, None])
        o_part = (i_head * Q + o_q) * (N // SPAN) + i_span
        b_top = tl.max(b_max, axis=1)
        tl.store(maxima + o_part, b_top, mask=m_q)
        tl.store(sums + o_part, tl.sum(b_sum * tl.exp(b_max - b_top[:, None]), axis=1), mask=m_q)


@triton.jit
def sum_kernel(
    maxima, sums, held, scores, log_sums,
    K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, N: tl.constexpr,
    SPANS: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The logarithm of each query's sum of exponentials; the first program of a KV head marks its held tokens."""
    i_head, i_q = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_q, o_p = i_q * BQ + tl.arange(0, BQ), tl.arange(0, SPANS)
    o_part, m_q = (i_head * Q + o_q)[:, None] * SPANS + o_p[None, :], o_q < Q
    b_max = tl.load(maxima + o_part, mask=m_q[:, None], other=UNREAD)
    b_top = tl.max(b_max, axis=1)
    b_sum = tl.sum(tl.load(sums + o_part, mask=m_q[:, None], other=0.0) * tl.exp(b_max - b_top[:, None]), axis=1)
    tl.store(log_sums + i_head * Q + o_q, b_top + tl.log(b_sum), mask=m_q)
    if i_q == 0:
        i_group = i_head // K * G + i_head % K // (K // G)
        for start in range(0, S, BS):
            o_s = start + tl.arange(0, BS)
            b_at = tl.load(held + i_group * S + o_s, mask=o_s < S, other=-1)
            tl.store(scores + i_head * Q * N + b_at, HELD, mask=(b_at >= 0) & (b_at < N))


@triton.jit
def share_kernel(
    scores, log_sums, position, shares, tops,
    K: tl.constexpr, R: tl.constexpr, T: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The largest mean attention of R heads over T queries to each token of some tiles, and the largest of each tile.

    Held tokens, and those that were not read, have -1.
    """
    first, i_head = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64)
    o_n = first + tl.arange(0, BN)
    read = _count_read(position + i_head // K * T, T)
    b_share = tl.full([BN], -1.0, tl.float32)
    if first < read:
        for start in range(0, T, BT):
            o_t = start + tl.arange(0, BT)
            m_t = o_t < T
            b_mean = tl.zeros([BT, BN], tl.float32)
            for r in range(0, R):
                o_q = i_head * (R * T) + r * T + o_t
                b_s = tl.load(scores + o_q[:, None] * N + o_n[None, :], mask=m_t[:, None], other=UNREAD)
                b_log_sum = tl.load(log_sums + o_q, mask=m_t, other=0.0)
                b_mean += tl.exp(b_s - b_log_sum[:, None])
            b_share = tl.maximum(b_share, tl.max(b_mean, axis=0) / R)
        b_first = tl.load(scores + i_head * (R * T) * N + o_n)
        b_share = tl.where((b_first == HELD) | (o_n >= read), -1.0, b_share)
    tl.store(shares + i_head * N + o_n, b_share)
    o_tile = first // TILE + tl.arange(0, BN // TILE)
    tl.store(tops + i_head * (N // TILE) + o_tile, tl.max(tl.reshape(b_share, [BN // TILE, TILE]), axis=1))


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
    if _first_position(position + i_head // K * T, T) != FAR:
        count = _select(shares, tops, tiles, values, names, chosen, N, COUNT, CHUNK)
        b_place = _place(chosen, count, guests, tiles, names, COUNT, STEPS)
    tl.store(places + o_g, b_place, mask=o_g < COUNT)


def search_triton(slots: PagedSlots, query: Tensor, key: Tensor, position: Tensor, scoring: Scoring) -> Tensor:
    """The guests [B, K, n] of a block of each sequence, as `select_kernel` places them; see `find_guests`.

    query [B, H, T, D] and position [B, T] are contiguous; key [B, K, T, D]
    """
    (B, H, T, D), (_, K, count, _), (_, G, S) = query.shape, slots.guest_keys.shape, slots.position.shape
    Q, N = H // K * T, slots.segments * recall.SEGMENT
    exact = partial(torch.empty, dtype=torch.float32, device=query.device)
    whole = partial(torch.empty, dtype=torch.int32, device=query.device)
    split = Q <= LEAST and query.dtype != torch.float32 and D >= LEAST_BYTES
    rows, span = min(ROWS, max(LEAST, triton.next_power_of_2(Q))), _find_span(B * K, N)
    spans = N // span
    scores, maxima, sums = exact(B, K, Q, N), exact(B, K, Q, spans), exact(B, K, Q, spans)
    score_kernel[(B * K, spans)](
        query, key, position, slots.table, *index_types(slots), scores, maxima, sums, scoring.scale, scoring.softcap,
        *key.stride()[:3], T,
        K=K, D=D, Q=Q, MOST=slots.table.shape[1], N=N, SPAN=span, BQ=rows, BN=TOKENS,
        SPLIT=split, num_warps=2 if split else 4,
    )  # fmt: skip
    log_sums, added = exact(B, K, Q), max(1, min(LEAST, SUMS // spans))
    sum_kernel[(B * K, triton.cdiv(Q, added))](
        maxima, sums, _find_held(slots, position), scores, log_sums,
        K=K, G=G, S=S, Q=Q, N=N, SPANS=spans, BQ=added, BS=min(CHUNK, triton.next_power_of_2(S)), num_warps=4,
    )  # fmt: skip
    shares, tops = exact(B, K, N), exact(B, K, N // paged_slots.TILE)
    block = min(LEAST, triton.next_power_of_2(T))
    ranked = max(paged_slots.TILE, RANKED // block)
    share_kernel[(N // ranked, B * K)](
        scores, log_sums, position, shares, tops,
        K=K, R=H // K, T=T, N=N, BT=block, BN=ranked, num_warps=4 if block == 1 else 1,
    )  # fmt: skip
    room, places = (B, K, count * paged_slots.TILE), whole(B, K, count)
    select_kernel[(B * K,)](
        shares, tops, position, slots.guest_position,
        whole(B, K, count), exact(*room), whole(*room), whole(B, K, count), places, T,
        K=K, N=N, COUNT=count, CHUNK=CHUNK, STEPS=(count - 1).bit_length(), num_warps=WARPS,
    )  # fmt: skip
    return places


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
