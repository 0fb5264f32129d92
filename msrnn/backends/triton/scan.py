"""The eviction scan on a GPU, one program per sequence and group; `scan_torch` is the reference.

It takes exponentials instead of scores: these are computed before, by the whole GPU. Tokens that come before the slots
are full are skipped, unless importance is summed over tokens: they evict nothing. Presence, importance and eviction
time of all candidates stay in registers from token to token, and the next token's weights are loaded ahead. The
candidates are split into two tiles, since the width of a tile is a power of two, and their number usually is not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.common import LEAST_NORMAL, PER_UNIT, UNIT, hide_protected, lower_limits
from msrnn.bound import Bound
from msrnn.core.slots import HELD

FAR = tl.constexpr(HELD)
LAST = tl.constexpr(2**63 - 1)
TILE = 2**14  # weights of one tile, heads by candidates
WARPS = 4
LEAST_WIDTH = 64  # whole blocks of the kernels that write and read weights
SPARE = 34 * 2**10  # bytes of shared memory that are not used for loading ahead; reductions take up to 2**15 + 4


class Tile(NamedTuple):
    """A part of a group's candidates, [BN] each: indices and positions, and what the scan computes."""

    o_n: Any
    b_position: Any
    b_free: Any  # positions, -1 where protected
    b_importance: Any
    b_evicted: Any  # eviction times
    m_present: Any  # not evicted yet


@triton.jit
def _load_tile(p_position, p_importance, protected, i_b, o_n, N, OBSERVES: tl.constexpr):
    """Candidates before the first token."""
    b_position = tl.load(p_position + o_n, mask=o_n < N, other=-1)
    b_importance = tl.zeros(o_n.shape, tl.float32)  # where nothing is observed, all tie, and the oldest is evicted
    if OBSERVES:
        b_importance = tl.load(p_importance + o_n, mask=o_n < N, other=0.0)
    b_free = hide_protected(b_position, protected, i_b)
    return Tile(o_n, b_position, b_free, b_importance, tl.full(o_n.shape, FAR, tl.int32), b_position >= 0)


@triton.jit
def _store_tile(tile, p_evicted, p_importance, N, OBSERVES: tl.constexpr, LIFTS: tl.constexpr):
    tl.store(p_evicted + tile.o_n, tile.b_evicted, mask=tile.o_n < N)
    if OBSERVES:
        b_importance = tile.b_importance
        if LIFTS:
            b_importance = b_importance * PER_UNIT
        tl.store(p_importance + tile.o_n, b_importance, mask=tile.o_n < N)


@triton.jit
def _count(m_n):
    return tl.sum(m_n.to(tl.int32))


@triton.jit
def _skip(p_t, held, size, C, BC: tl.constexpr):
    """The number of tokens that come before the slots are full, and the number of rows held after them."""
    o_i = tl.arange(0, triton.next_power_of_2(BC))
    b_t = tl.load(p_t + o_i, mask=o_i < C, other=-1)
    b_held = held + tl.cumsum((b_t >= 0).to(tl.int32), axis=0)
    m_fits = (b_held <= size) & (o_i < BC)
    return _count(m_fits), tl.max(tl.where(m_fits, b_held, held))


@triton.jit
def _find_seen(tile, t):
    return tile.m_present & (tile.b_position <= t)


@triton.jit
def _find_expired(tile, t, window, spared, SLIDING: tl.constexpr):
    """The candidates that have left the window."""
    b_leaves = tile.b_position if SLIDING else tile.b_free
    return tile.m_present & (b_leaves >= spared) & (b_leaves <= t - window)


@triton.jit
def _evict(tile, m_evicted, t):
    """The tile without some candidates; step `t` is the last that saw them."""
    b_evicted = tl.where(m_evicted, t, tile.b_evicted)
    m_present = tile.m_present & (m_evicted == 0)
    return Tile(tile.o_n, tile.b_position, tile.b_free, tile.b_importance, b_evicted, m_present)


@triton.jit
def _load_weights(p_rows, tile, m_m, t, MASKED: tl.constexpr):
    """Weights [BM, BN] of the candidates that are seen, others 0; unmasked loads are wider."""
    if MASKED:
        b_w = tl.load(p_rows + tile.o_n[None, :], mask=m_m[:, None], other=0.0)
    else:
        b_w = tl.load(p_rows + tile.o_n[None, :])
    return tl.where(_find_seen(tile, t)[None, :], b_w, 0.0)


@triton.jit
def _add_attention(
    b_l, b_r, left, right, weights, sinks, i_row, start, t,
    M: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr, LIFTS: tl.constexpr,
):  # fmt: skip
    """Add the part of BM heads in the group's mean attention, for both tiles; times UNIT where it LIFTS."""
    o_m = start + tl.arange(0, BM)
    m_m = o_m < M
    p_rows = weights + (i_row + o_m)[:, None] * WIDTH
    b_wl, b_wr = _load_weights(p_rows, left, m_m, t, M % BM != 0), _load_weights(p_rows, right, m_m, t, M % BM != 0)
    b_sum = tl.sum(b_wl, axis=1) + tl.sum(b_wr, axis=1)
    if sinks is not None:
        b_sum += tl.load(sinks + i_row + o_m, mask=m_m, other=0.0)
    if LIFTS:
        # Weights are at most their sum: below 1 they can be scaled up, otherwise the sum is scaled down.
        m_small = b_sum < 1.0
        b_lift = tl.where(m_small, UNIT, 1.0)[:, None]
        b_wl, b_wr = b_wl * b_lift, b_wr * b_lift
        b_sum = tl.where(m_small, tl.maximum(b_sum, LEAST_NORMAL), b_sum * PER_UNIT)
    b_share = (1.0 / (tl.where(b_sum == 0, 1.0, b_sum) * M))[:, None]
    return b_l + tl.sum(b_wl * b_share, axis=0), b_r + tl.sum(b_wr * b_share, axis=0)


@triton.jit
def _remember(tile, b_attention, t, decay, LIFTS: tl.constexpr):
    """The tile with new importances."""
    if not LIFTS:  # with decay 0, only the newest query counts
        b_attention += decay * tile.b_importance
    b_importance = tl.where(_find_seen(tile, t), b_attention, tile.b_importance)
    return Tile(tile.o_n, tile.b_position, tile.b_free, b_importance, tile.b_evicted, tile.m_present)


@triton.jit
def _rank(tile, b_weight, t, first, recent, OBSERVES: tl.constexpr):
    """A sort key: least rank first, then the oldest. The bits of a non-negative float sort like the float.

    NaN counts as infinity, whatever its sign. Where nothing is observed, weights rank alone.
    """
    b_rank = tile.b_importance
    if b_weight is not None:
        b_rank = b_rank * b_weight if OBSERVES else b_weight
    b_rank = tl.where(b_rank != b_rank, float("inf"), b_rank)
    b_bits = b_rank.to(tl.int32, bitcast=True).to(tl.int64)
    m_free = _find_seen(tile, t) & (tile.b_free >= first) & (tile.b_free <= t - recent)
    return tl.where(m_free, (b_bits << 32) | tile.b_position, LAST)


@triton.jit(do_not_specialize=["C", "N", "size", "first", "recent", "window", "spared"])
def scan_kernel(
    weights, position, importance, query_position, sinks, row_weight, protected, fewer, evicted_at,
    decay, size, first, recent, window, spared, C, N,
    G: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    LIFTS: tl.constexpr, STAGES: tl.constexpr, SLIDING: tl.constexpr,
):  # fmt: skip
    """Without weights nothing is observed; sinks, row_weight, protected, fewer and window may be None, too."""
    OBSERVES: tl.constexpr = weights is not None
    SKIPS: tl.constexpr = (LIFTS or not OBSERVES) and window is None
    WIDTH: tl.constexpr = BN + BR
    i_b, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    decay = tl.cast(decay, tl.float32)
    size, recent = lower_limits(size, recent, fewer, i_b)
    i_group = i_b * G + i_g
    o_group, p_t = i_group * N, query_position + i_b * C
    p_position, p_importance = position + o_group, importance + o_group
    left = _load_tile(p_position, p_importance, protected, i_b, tl.arange(0, BN), N, OBSERVES)
    right = _load_tile(p_position, p_importance, protected, i_b, BN + tl.arange(0, BR), N, OBSERVES)
    b_weight_l, b_weight_r = None, None
    if row_weight is not None:
        b_weight_l = tl.load(row_weight + o_group + left.o_n, mask=left.o_n < N, other=0.0)
        b_weight_r = tl.load(row_weight + o_group + right.o_n, mask=right.o_n < N, other=0.0)
    # Before the first row, what the slots hold: the last C candidates are new, one for each row.
    held = _count(left.m_present & (left.o_n < N - C)) + _count(right.m_present & (right.o_n < N - C))
    skipped = 0
    if SKIPS:
        skipped, held = _skip(p_t, held, size, C, BC)
    for i in tl.range(skipped, BC, num_stages=STAGES):
        t = tl.load(p_t + i, mask=i < C, other=-1)
        if window is not None:
            m_l = _find_expired(left, t, window, spared, SLIDING)
            m_r = _find_expired(right, t, window, spared, SLIDING)
            left, right = _evict(left, m_l, t - 1), _evict(right, m_r, t - 1)
            held -= _count(m_l) + _count(m_r)
        held += (t >= 0).to(tl.int32)
        if OBSERVES:
            b_l, b_r = tl.zeros([BN], tl.float32), tl.zeros([BR], tl.float32)
            i_row = (i_group * BC + i) * M
            if STAGES > 1:
                for start in tl.static_range(0, M, BM):
                    b_l, b_r = _add_attention(
                        b_l, b_r, left, right, weights, sinks, i_row, start, t, M, BM, WIDTH, LIFTS
                    )
            else:  # the weights of a token do not fit into shared memory, but a tile does
                for start in tl.range(0, M, BM, num_stages=3):
                    b_l, b_r = _add_attention(
                        b_l, b_r, left, right, weights, sinks, i_row, start, t, M, BM, WIDTH, LIFTS
                    )
            left, right = _remember(left, b_l, t, decay, LIFTS), _remember(right, b_r, t, decay, LIFTS)
        b_rank_l = _rank(left, b_weight_l, t, first, recent, OBSERVES)
        b_rank_r = _rank(right, b_weight_r, t, first, recent, OBSERVES)
        least = tl.minimum(tl.min(b_rank_l, axis=0), tl.min(b_rank_r, axis=0))
        evicts = (held > size) & (t >= 0) & (least != LAST)
        held -= evicts.to(tl.int32)
        least = tl.where(evicts, least, -1)
        left, right = _evict(left, b_rank_l == least, t), _evict(right, b_rank_r == least, t)
    _store_tile(left, evicted_at + o_group, importance + o_group, N, OBSERVES, LIFTS)
    _store_tile(right, evicted_at + o_group, importance + o_group, N, OBSERVES, LIFTS)


class Room(NamedTuple):
    """The shape of a chunk's weights: rows and candidates are rounded up, so that no load needs a mask."""

    rows: int
    left: int  # the largest power of two that the candidates fill, or one block
    right: int  # and one for the rest

    @property
    def width(self) -> int:
        return self.left + self.right


def room(C: int, N: int) -> Room:
    left = max(LEAST_WIDTH, triton.next_power_of_2(N + 1) // 2)
    return Room(triton.cdiv(C, 16) * 16, left, max(LEAST_WIDTH, triton.next_power_of_2(N - left)))


def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**17  # the interpreter has no limit
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def scan_triton(
    weights: Tensor | None,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    sinks: Tensor | None = None,
    row_weight: Tensor | None = None,
    protected: Tensor | None = None,
    fewer: Tensor | None = None,
) -> Tensor:
    """`scan_torch` with weights [B, G, rows, M, width] instead of scores: exponentials, each row up to a factor.

    Numbers beyond the C rows and N candidates (see `room`) are ignored; sinks [B, G, rows, M] are weights as well. The
    attention itself is not computed. Without weights nothing is observed.
    """
    (B, G, N), C = position.shape, query_position.shape[1]
    rows, left, right = room(C, N)
    M = weights.shape[3] if weights is not None else 1
    evicted_at = torch.empty_like(position)
    heads = max(1, min(triton.next_power_of_2(M), triton.next_power_of_2(TILE // (left + right) + 1) // 2))
    row_bytes = 4 * triton.cdiv(M, heads) * heads * (left + right)
    ahead = (_shared_memory(position.device) - SPARE) // row_bytes
    policy = bound.policy
    observes = policy.decay is not None
    assert not observes or weights is not None
    scan_kernel[(B, G)](
        weights if observes else None, position, importance, query_position.contiguous(), sinks, row_weight, protected,
        fewer, evicted_at, policy.decay or 0.0, bound.size, policy.first, bound.recent, bound.window, bound.spared,
        C, N, G=G, M=M, BC=rows, BM=heads, BN=left, BR=right, LIFTS=policy.decay == 0, STAGES=1 + min(2, ahead),
        SLIDING=bound.sliding, num_warps=WARPS,
    )  # fmt: skip
    return evicted_at
