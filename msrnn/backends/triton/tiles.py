"""Tiles of candidates in the eviction scan: which are seen, the attention that they get, their ranks, and evictions.

The candidates of a group are split into two tiles, since the width of a tile is a power of two, and their number
usually is not. Index names as in `attend.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from msrnn.backends.triton.common import LEAST_NORMAL, PER_UNIT, UNIT, hide_protected
from msrnn.core.slots import HELD

FAR = tl.constexpr(HELD)
LAST = tl.constexpr(2**63 - 1)


class Tile(NamedTuple):
    """A part of a group's candidates, [BN] each: indices and positions, and what the scan computes."""

    o_n: Any
    b_position: Any
    b_free: Any  # positions, -1 where protected
    b_importance: Any
    b_evicted: Any  # eviction times
    m_present: Any  # not evicted yet


@triton.jit
def load_tile(p_position, p_importance, p_start, protected, i_b, o_n, N, OBSERVES: tl.constexpr):
    """Candidates before a token; `p_start` is None, or has the eviction times of tokens before it."""
    b_position = tl.load(p_position + o_n, mask=o_n < N, other=-1)
    b_importance = tl.zeros(o_n.shape, tl.float32)  # where nothing is observed, all tie, and the oldest is evicted
    if OBSERVES:
        b_importance = tl.load(p_importance + o_n, mask=o_n < N, other=0.0)
    b_free = hide_protected(b_position, protected, i_b)
    b_evicted = tl.full(o_n.shape, FAR, tl.int32)
    if p_start is not None:
        b_evicted = tl.load(p_start + o_n, mask=o_n < N, other=FAR)
    m_present = (b_position >= 0) & (b_evicted == FAR)
    return Tile(o_n, b_position, b_free, b_importance, b_evicted, m_present)


@triton.jit
def store_importance(tile, p_importance, N, LIFTS: tl.constexpr):
    b_importance = tile.b_importance
    if LIFTS:
        b_importance = b_importance * PER_UNIT
    tl.store(p_importance + tile.o_n, b_importance, mask=tile.o_n < N)


@triton.jit
def count(m_n):
    return tl.sum(m_n.to(tl.int32))


@triton.jit
def skip_rows(p_t, held, size, begin, C, BC: tl.constexpr):
    """The first token from `begin` on after which the slots are full, and the number of rows held before it."""
    o_i = tl.arange(0, triton.next_power_of_2(BC))
    b_t = tl.load(p_t + o_i, mask=(o_i >= begin) & (o_i < C), other=-1)
    b_held = held + tl.cumsum((b_t >= 0).to(tl.int32), axis=0)
    m_fits = (b_held <= size) & (o_i < BC)
    return tl.maximum(begin, count(m_fits)), tl.max(tl.where(m_fits, b_held, held))


@triton.jit
def find_seen(tile, t):
    return tile.m_present & (tile.b_position <= t)


@triton.jit
def find_expired(tile, t, window, spared, SLIDING: tl.constexpr):
    """The candidates that have left the window."""
    b_leaves = tile.b_position if SLIDING else tile.b_free
    return tile.m_present & (b_leaves >= spared) & (b_leaves <= t - window)


@triton.jit
def evict(tile, m_evicted, t):
    """The tile without some candidates; step `t` is the last that saw them."""
    b_evicted = tl.where(m_evicted, t, tile.b_evicted)
    m_present = tile.m_present & (m_evicted == 0)
    return Tile(tile.o_n, tile.b_position, tile.b_free, tile.b_importance, b_evicted, m_present)


@triton.jit
def _load_weights(p_rows, o_n, m_n, m_m, MASKED: tl.constexpr):
    """Weights [BM, BN] of the candidates m_n, others 0; unmasked loads are wider."""
    p_w = p_rows + o_n[None, :]
    b_w = tl.load(p_w, mask=m_m[:, None], other=0.0) if MASKED else tl.load(p_w)
    return tl.where(m_n[None, :], b_w, 0.0)


@triton.jit
def _sum_weights(b_w, m_n):
    """The sums [BM] over the candidates m_n, or over all where it is None."""
    if m_n is not None:
        b_w = tl.where(m_n[None, :], b_w, 0.0)
    return tl.sum(b_w, axis=1)


@triton.jit
def add_attention(
    b_l, b_r, o_l, o_r, m_l, m_r, m_sum_l, m_sum_r, weights, sinks, i_row, start,
    M: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr, LIFTS: tl.constexpr,
):  # fmt: skip
    """Add the part of BM heads in the group's mean attention to the candidates m_l and m_r of both tiles.

    It is relative to the weights of these, or of m_sum_l and m_sum_r where they are given; times UNIT where it LIFTS.
    """
    o_m = start + tl.arange(0, BM)
    m_m = o_m < M
    p_rows = weights + (i_row + o_m)[:, None] * WIDTH
    b_wl, b_wr = _load_weights(p_rows, o_l, m_l, m_m, M % BM != 0), _load_weights(p_rows, o_r, m_r, m_m, M % BM != 0)
    b_sum = _sum_weights(b_wl, m_sum_l) + _sum_weights(b_wr, m_sum_r)
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
def remember(tile, b_attention, t, decay, LIFTS: tl.constexpr):
    """The tile with new importances."""
    if not LIFTS:  # with decay 0, only the newest query counts
        b_attention += decay * tile.b_importance
    b_importance = tl.where(find_seen(tile, t), b_attention, tile.b_importance)
    return Tile(tile.o_n, tile.b_position, tile.b_free, b_importance, tile.b_evicted, tile.m_present)


@triton.jit
def rank(tile, b_weight, t, first, recent, OBSERVES: tl.constexpr):
    """A sort key: least rank first, then the oldest. The bits of a non-negative float sort like the float.

    NaN counts as infinity, whatever its sign. Where nothing is observed, weights rank alone.
    """
    b_rank = tile.b_importance
    if b_weight is not None:
        b_rank = b_rank * b_weight if OBSERVES else b_weight
    b_rank = tl.where(b_rank != b_rank, float("inf"), b_rank)
    b_bits = b_rank.to(tl.int32, bitcast=True).to(tl.int64)
    m_free = find_seen(tile, t) & (tile.b_free >= first) & (tile.b_free <= t - recent)
    return tl.where(m_free, (b_bits << 32) | tile.b_position, LAST)
