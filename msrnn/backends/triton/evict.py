"""Observe and evict for one token of one layer: the second launch of a decode step."""

from __future__ import annotations

import triton
import triton.language as tl

from msrnn.backends.triton.common import PER_UNIT, find_row, hide_earlier, hide_protected, lift_exp, lower_limits
from msrnn.backends.triton.row_weight import combine_weight, draw_weight
from msrnn.core.slots import HELD

FAR = tl.constexpr(HELD)
EVICT_WARPS = 8
TILE = 2**15  # scores at once, heads by slots: more do not fit into registers


@triton.constexpr_function
def heads_at_once(heads: int, slots: int) -> int:
    return int(max(1, min(triton.next_power_of_2(heads), TILE // slots)))


@triton.jit
def _attention_sum(scores, log_sums, i_group, o_s, S: tl.constexpr, M: tl.constexpr):
    """The attention [BS] of a group's M heads, summed and scaled up; arbitrary for empty slots."""
    BM: tl.constexpr = heads_at_once(M, o_s.shape[0])
    b_sum = tl.zeros([o_s.shape[0]], tl.float32)
    for start in range(0, M, BM):
        o_m = start + tl.arange(0, BM)
        i_h = i_group * M + o_m
        # [BM, BS]; scores of empty slots are arbitrary: a mask for them would delay the loads
        m_tile = (o_m < M)[:, None] & (o_s < S)[None, :]
        b_s = tl.load(scores + i_h[:, None] * S + o_s[None, :], mask=m_tile, other=float("-inf"))
        b_log_sum = tl.load(log_sums + i_h, mask=o_m < M, other=0.0)
        b_sum += tl.sum(lift_exp(b_s - b_log_sum[:, None]), axis=0)
    return b_sum


@triton.jit
def _sum_heads(numbers, i_group, MEMBERS: tl.constexpr):
    """The sum over all KV heads of a group, of numbers [B, K]."""
    o_k = tl.arange(0, triton.next_power_of_2(MEMBERS))
    return tl.sum(tl.load(numbers + i_group * MEMBERS + o_k, mask=o_k < MEMBERS, other=0.0))


@triton.jit
def observe_kernel(
    scores, log_sums, squares, graded, observed, S: tl.constexpr, M: tl.constexpr, MEMBERS: tl.constexpr
):
    """What the processes that share a group add up before the eviction: [B, G, S] attention, one squared norm, and
    what networks say of the new row.

    `scores`, `squares` and `graded` are None where they are not needed.
    """
    i_group = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, triton.next_power_of_2(S))
    p_observed = observed + i_group * (S + 2)
    if scores is not None:
        b_sum = _attention_sum(scores, log_sums, i_group, o_s, S, M)
        tl.store(p_observed + o_s, b_sum, mask=o_s < S)
    if squares is not None:
        tl.store(p_observed + S, _sum_heads(squares, i_group, MEMBERS))
    if graded is not None:
        tl.store(p_observed + S + 1, _sum_heads(graded, i_group, MEMBERS))


@triton.jit
def _weigh(
    p_observed, squares, graded, alpha, layer, group, t, i_group,
    S: tl.constexpr, MEMBERS: tl.constexpr, PROCESSES: tl.constexpr,
):  # fmt: skip
    """The weight of the new token's row; no early return, since code after one is compiled as well."""
    if layer is not None:
        weight = draw_weight(t, layer, group)
    else:
        square = tl.load(p_observed + S) if p_observed is not None else _sum_heads(squares, i_group, MEMBERS)
        if graded is None:
            weight = tl.sqrt(square)
        else:
            said = tl.load(p_observed + S + 1) if p_observed is not None else _sum_heads(graded, i_group, MEMBERS)
            weight = combine_weight(square, said / (MEMBERS * PROCESSES), tl.load(alpha))
    return weight


@triton.jit(do_not_specialize=["layer", "group"])
def evict_kernel(
    fresh, scores, log_sums, position, importance, row_weight, squares, graded, alpha, layer, group, query_position,
    observed, sequences, protected, fewer, decay, size, first, recent, window, spared,
    S: tl.constexpr, G: tl.constexpr, M: tl.constexpr, MEMBERS: tl.constexpr, PROCESSES: tl.constexpr,
    SLIDING: tl.constexpr,
):  # fmt: skip
    """Write the new token's position, add the group's mean attention to the importances, and evict the least important
    KV row that is not protected.

    The weight of the new row comes from the squared norms of its values, `squares` [B, K], and from what networks say
    of it, `graded` [B, K], or from the layer's index and that of the process's first group. Where a group is joint,
    `observed` has the sums over its processes, and M counts the heads of all of them. What is not there is
    None: importance, row_weight, squares, graded and alpha, layer, observed, sequences, protected, fewer, decay,
    window.

    Without observation weights rank alone; without those, too, the oldest KV row is evicted, as in every tie. NaN is
    infinity.
    """
    i_b, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_group, i_p = i_b * G + i_g, find_row(sequences, i_b)
    i_row = (i_p * G + i_g) * S
    t = tl.load(query_position + i_b)
    if t >= 0:
        own_size, own_recent = lower_limits(size, recent, fewer, i_p)  # arguments may be constants
        o_s = tl.arange(0, triton.next_power_of_2(S))
        m_s = o_s < S
        p_position = position + i_row + o_s
        b_position = hide_earlier(tl.load(p_position, mask=m_s, other=-1), sequences, t)
        m_new = o_s == tl.load(fresh + i_group)
        if window is not None:
            b_leaves = b_position if SLIDING else hide_protected(b_position, protected, i_p)
            b_position = tl.where((b_leaves >= spared) & (b_leaves <= t - window), -1, b_position)
        b_position = tl.where(m_new, t, b_position)
        m_held = b_position >= 0
        b_free = hide_protected(b_position, protected, i_p)  # early, so that its loads delay nothing
        b_importance = tl.zeros(o_s.shape, tl.float32)
        p_observed = None
        if observed is not None:
            p_observed = observed + i_group * (S + 2)
        if decay is not None:
            if p_observed is not None:
                b_importance = tl.load(p_observed + o_s, mask=m_s, other=0.0)
            else:
                b_importance = _attention_sum(scores, log_sums, i_group, o_s, S, M)
            b_importance = tl.where(m_held, b_importance / M, 0.0)
        if importance is not None:
            p_importance = importance + i_row + o_s
            b_importance *= PER_UNIT
            b_before = tl.load(p_importance, mask=m_held & (m_new == 0), other=0.0)
            b_importance += tl.cast(decay, tl.float32) * b_before
            tl.store(p_importance, b_importance, mask=m_held)
        b_rank = b_importance
        if row_weight is not None:
            weight = _weigh(
                p_observed, squares, graded, alpha, layer, group + i_g, t, i_group, S, MEMBERS, PROCESSES
            )  # fmt: skip
            p_weight = row_weight + i_row + o_s
            b_weight = tl.where(m_new, weight, tl.load(p_weight, mask=m_s, other=0.0))
            tl.store(p_weight, b_weight, mask=m_new)
            b_rank = b_weight if decay is None else b_importance * b_weight
        m_free = m_held & (b_free >= first) & (b_free <= t - own_recent)
        b_ranked = tl.where(m_free & (b_rank == b_rank), b_rank, float("inf"))
        m_least = m_free & (b_ranked == tl.min(b_ranked))
        oldest = tl.min(tl.where(m_least, b_position, FAR))
        m_evicted = m_least & (b_position == oldest) & (tl.sum(m_held.to(tl.int32)) > own_size)
        tl.store(p_position, tl.where(m_evicted, -1, b_position), mask=m_s)
