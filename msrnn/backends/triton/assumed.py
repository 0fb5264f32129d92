"""The mean attention of all tokens of a chunk at once, as if it were known what is evicted and when."""

from __future__ import annotations

import triton
import triton.language as tl

from msrnn.backends.triton.common import lower_limits
from msrnn.backends.triton.tiles import add_attention, count


@triton.jit
def _find_assumed(m_n, p_assumed, o_n, N, t):
    """The candidates that a token is assumed to see, of those m_n that came before it."""
    return m_n & (tl.load(p_assumed + o_n, mask=o_n < N, other=-1) >= t)


@triton.jit
def _attend_row(
    i, i_b, i_g, weights, sinks, position, query_position, assumed_at, fewer, means, size, C, N,
    G: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    LIFTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = BN + BR
    i_group = i_b * G + i_g
    o_l, o_r, o_c = tl.arange(0, BN), BN + tl.arange(0, BR), tl.arange(0, triton.next_power_of_2(BC))
    p_position, p_assumed = position + i_group * N, assumed_at + i_group * N
    t = tl.load(query_position + i_b * C + i, mask=i < C, other=-1)
    b_l, b_r = tl.load(p_position + o_l, mask=o_l < N, other=-1), tl.load(p_position + o_r, mask=o_r < N, other=-1)
    evicts = t >= 0
    if SKIPS:
        size, _ = lower_limits(size, 0, fewer, i_b)
        b_t = tl.load(query_position + i_b * C + o_c, mask=(o_c <= i) & (o_c < C), other=-1)
        held = count((b_l >= 0) & (o_l < N - C)) + count((b_r >= 0) & (o_r < N - C)) + count(b_t >= 0)
        evicts = evicts & (held > size)
    if evicts:
        m_l, m_r = (b_l >= 0) & (b_l <= t), (b_r >= 0) & (b_r <= t)
        m_sum_l = _find_assumed(m_l, p_assumed, o_l, N, t)
        m_sum_r = _find_assumed(m_r, p_assumed, o_r, N, t)
        b_mean_l, b_mean_r = tl.zeros([BN], tl.float32), tl.zeros([BR], tl.float32)
        for start in tl.range(0, M, BM):
            b_mean_l, b_mean_r = add_attention(
                b_mean_l, b_mean_r, o_l, o_r, m_l, m_r, m_sum_l, m_sum_r, weights, sinks, (i_group * BC + i) * M, start,
                M, BM, WIDTH, LIFTS,
            )  # fmt: skip
        p_row = means + (i_group * BC + i) * WIDTH
        tl.store(p_row + o_l, b_mean_l)
        tl.store(p_row + o_r, b_mean_r)


@triton.jit(do_not_specialize=["begin", "C", "N", "size"])
def assume_kernel(
    weights, sinks, position, query_position, assumed_at, settled, fewer, means, size, begin, C, N,
    G: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    LIFTS: tl.constexpr, SKIPS: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """One token of a group: the mean of its heads' attention to all candidates before it, [width].

    It is relative to the weights of those that it sees if the eviction times `assumed_at` are true. `settled` is
    unknown at the INITIAL round.
    """
    i, i_g, i_b = begin + tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pending = True
    if not INITIAL:
        pending = tl.load(settled + i_b * G + i_g) == 0
    if pending:
        _attend_row(
            i, i_b, i_g, weights, sinks, position, query_position, assumed_at, fewer, means, size, C, N,
            G, M, BC, BM, BN, BR, LIFTS, SKIPS,
        )  # fmt: skip
