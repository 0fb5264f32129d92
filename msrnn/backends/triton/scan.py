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

from msrnn.backends.triton.common import LEAST_NORMAL, PER_UNIT, UNIT
from msrnn.core.slots import HELD
from msrnn.policy import Bound

FAR = tl.constexpr(HELD)
LAST = tl.constexpr(2**63 - 1)
TILE = 2**14  # weights of one tile, heads by candidates
WARPS = 4
LEAST_WIDTH = 64  # whole blocks of the kernels that write and read weights
SPARE = 34 * 2**10  # bytes of shared memory that are not used for loading ahead; reductions take up to 2**15 + 4


@triton.jit
def _rank(b_position, b_importance, m_seen, first, newest):
    """A sort key: least importance first, then the oldest. The bits of a non-negative float sort like the float.

    NaN counts as infinity, whatever its sign.
    """
    b_importance = tl.where(b_importance != b_importance, float("inf"), b_importance)
    b_bits = b_importance.to(tl.int32, bitcast=True).to(tl.int64)
    m_free = m_seen & (b_position >= first) & (b_position <= newest)
    return tl.where(m_free, (b_bits << 32) | b_position, LAST)


@triton.jit
def _observed(
    weights, sinks, i_row, start, o_l, o_r, m_seen_l, m_seen_r,
    M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, SINKS: tl.constexpr, LIFTS: tl.constexpr,
):  # fmt: skip
    """The part of BM heads in the group's mean attention, for both tiles; times UNIT where it LIFTS."""
    o_m = start + tl.arange(0, BM)
    m_m = o_m < M
    p_row = weights + (i_row + o_m)[:, None] * (BN + BR)
    # [BM, BN], [BM, BR]; without a mask where none is needed, since a mask would make the loads narrower
    if M % BM == 0:
        b_l, b_r = tl.load(p_row + o_l[None, :]), tl.load(p_row + o_r[None, :])
    else:
        b_l = tl.load(p_row + o_l[None, :], mask=m_m[:, None], other=0.0)
        b_r = tl.load(p_row + o_r[None, :], mask=m_m[:, None], other=0.0)
    b_l, b_r = tl.where(m_seen_l[None, :], b_l, 0.0), tl.where(m_seen_r[None, :], b_r, 0.0)
    b_sum = tl.sum(b_l, axis=1) + tl.sum(b_r, axis=1)
    if SINKS:
        b_sum += tl.load(sinks + i_row + o_m, mask=m_m, other=0.0)
    if LIFTS:
        # Weights are at most their sum: below 1 they can be scaled up, otherwise the sum is scaled down.
        m_small = b_sum < 1.0
        b_lift = tl.where(m_small, UNIT, 1.0)[:, None]
        b_l, b_r = b_l * b_lift, b_r * b_lift
        b_sum = tl.where(m_small, tl.maximum(b_sum, LEAST_NORMAL), b_sum * PER_UNIT)
    b_share = (1.0 / (tl.where(b_sum == 0, 1.0, b_sum) * M))[:, None]
    return tl.sum(b_l * b_share, axis=0), tl.sum(b_r * b_share, axis=0)


@triton.jit(do_not_specialize=["C", "N", "size", "first", "recent", "window", "spared"])
def scan_kernel(
    weights,
    position,
    importance,
    query_position,
    sinks,
    norm,
    evicted_at,
    decay,
    size,
    first,
    recent,
    window,
    spared,
    C,
    N,
    G: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    OBSERVES: tl.constexpr,
    SLIDES: tl.constexpr,
    SINKS: tl.constexpr,
    WEIGHS: tl.constexpr,
    LIFTS: tl.constexpr,
    SKIPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_b, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    decay = tl.cast(decay, tl.float32)
    i_group = i_b * G + i_g
    o_l, o_r = tl.arange(0, BN), BN + tl.arange(0, BR)
    m_l, m_r = o_l < N, o_r < N
    p_group = i_group * N
    b_position_l = tl.load(position + p_group + o_l, mask=m_l, other=-1)
    b_position_r = tl.load(position + p_group + o_r, mask=m_r, other=-1)
    b_importance_l = tl.zeros([BN], tl.float32)  # where nothing is observed, all tie, and the oldest is evicted
    b_importance_r = tl.zeros([BR], tl.float32)
    if OBSERVES:
        b_importance_l = tl.load(importance + p_group + o_l, mask=m_l, other=0.0)
        b_importance_r = tl.load(importance + p_group + o_r, mask=m_r, other=0.0)
    if WEIGHS:
        b_norm_l = tl.load(norm + p_group + o_l, mask=m_l, other=0.0)
        b_norm_r = tl.load(norm + p_group + o_r, mask=m_r, other=0.0)
    b_evicted_l = tl.full([BN], FAR, tl.int32)
    b_evicted_r = tl.full([BR], FAR, tl.int32)
    m_present_l, m_present_r = b_position_l >= 0, b_position_r >= 0
    # Before the first row, what the slots hold: the last C candidates are new, one for each row.
    held = tl.sum((m_present_l & (o_l < N - C)).to(tl.int32)) + tl.sum((m_present_r & (o_r < N - C)).to(tl.int32))
    skipped = 0
    if SKIPS:
        o_i = tl.arange(0, BP)
        b_t = tl.load(query_position + i_b * C + o_i, mask=o_i < C, other=-1)
        b_held = held + tl.cumsum((b_t >= 0).to(tl.int32), axis=0)
        m_fits = (b_held <= size) & (o_i < BC)
        skipped = tl.sum(m_fits.to(tl.int32))
        held = tl.max(tl.where(m_fits, b_held, held))
    for i in tl.range(skipped, BC, num_stages=STAGES):
        t = tl.load(query_position + i_b * C + i, mask=i < C, other=-1)
        if SLIDES:
            m_expired_l = m_present_l & (b_position_l >= spared) & (b_position_l <= t - window)
            m_expired_r = m_present_r & (b_position_r >= spared) & (b_position_r <= t - window)
            b_evicted_l = tl.where(m_expired_l, t - 1, b_evicted_l)
            b_evicted_r = tl.where(m_expired_r, t - 1, b_evicted_r)
            m_present_l, m_present_r = m_present_l & (m_expired_l == 0), m_present_r & (m_expired_r == 0)
            held -= tl.sum(m_expired_l.to(tl.int32)) + tl.sum(m_expired_r.to(tl.int32))
        held += (t >= 0).to(tl.int32)
        m_seen_l, m_seen_r = m_present_l & (b_position_l <= t), m_present_r & (b_position_r <= t)
        if OBSERVES:
            b_observed_l = tl.zeros([BN], tl.float32)
            b_observed_r = tl.zeros([BR], tl.float32)
            i_row = (i_group * BC + i) * M
            if STAGES > 1:
                for start in tl.static_range(0, M, BM):
                    b_l, b_r = _observed(
                        weights, sinks, i_row, start, o_l, o_r, m_seen_l, m_seen_r, M, BM, BN, BR, SINKS, LIFTS
                    )
                    b_observed_l, b_observed_r = b_observed_l + b_l, b_observed_r + b_r
            else:  # the weights of a token do not fit into shared memory, but a tile does
                for start in tl.range(0, M, BM, num_stages=3):
                    b_l, b_r = _observed(
                        weights, sinks, i_row, start, o_l, o_r, m_seen_l, m_seen_r, M, BM, BN, BR, SINKS, LIFTS
                    )
                    b_observed_l, b_observed_r = b_observed_l + b_l, b_observed_r + b_r
            if not LIFTS:  # with decay 0, only the newest query counts
                b_observed_l += decay * b_importance_l
                b_observed_r += decay * b_importance_r
            b_importance_l = tl.where(m_seen_l, b_observed_l, b_importance_l)
            b_importance_r = tl.where(m_seen_r, b_observed_r, b_importance_r)
        b_weight_l, b_weight_r = b_importance_l, b_importance_r
        if WEIGHS:
            b_weight_l, b_weight_r = b_weight_l * b_norm_l, b_weight_r * b_norm_r
        b_rank_l = _rank(b_position_l, b_weight_l, m_seen_l, first, t - recent)
        b_rank_r = _rank(b_position_r, b_weight_r, m_seen_r, first, t - recent)
        least = tl.minimum(tl.min(b_rank_l, axis=0), tl.min(b_rank_r, axis=0))
        evicts = (held > size) & (t >= 0) & (least != LAST)
        held -= evicts.to(tl.int32)
        least = tl.where(evicts, least, -1)
        m_evicted_l, m_evicted_r = b_rank_l == least, b_rank_r == least
        b_evicted_l, b_evicted_r = tl.where(m_evicted_l, t, b_evicted_l), tl.where(m_evicted_r, t, b_evicted_r)
        m_present_l, m_present_r = m_present_l & (m_evicted_l == 0), m_present_r & (m_evicted_r == 0)
    tl.store(evicted_at + p_group + o_l, b_evicted_l, mask=m_l)
    tl.store(evicted_at + p_group + o_r, b_evicted_r, mask=m_r)
    if OBSERVES:
        if LIFTS:
            b_importance_l, b_importance_r = b_importance_l * PER_UNIT, b_importance_r * PER_UNIT
        tl.store(importance + p_group + o_l, b_importance_l, mask=m_l)
        tl.store(importance + p_group + o_r, b_importance_r, mask=m_r)


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
    norm: Tensor | None = None,
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
        weights if weights is not None else position, position, importance, query_position.contiguous(),
        sinks if sinks is not None else position, norm if norm is not None else position, evicted_at,
        policy.decay or 0.0, bound.size, policy.first, bound.recent, bound.window or 0, bound.spared, C, N,
        G=G, M=M, BC=rows, BP=triton.next_power_of_2(rows), BM=heads, BN=left, BR=right,
        OBSERVES=observes, SLIDES=bound.window is not None, SINKS=sinks is not None,
        WEIGHS=norm is not None, LIFTS=policy.decay == 0, SKIPS=not policy.decay and bound.window is None,
        STAGES=1 + min(2, ahead), num_warps=WARPS,
    )  # fmt: skip
    return evicted_at
