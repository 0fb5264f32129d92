"""The eviction scan on a GPU, one program per sequence and group; `scan_torch` is the reference.

It takes exponentials instead of scores: these are computed before, by the whole GPU. Tokens that come before the slots
are full are skipped, unless importance is summed over tokens: they evict nothing. Presence, importance and eviction
time of all candidates stay in registers from token to token, and the next token's weights are loaded ahead.

**Rounds.** An eviction changes the attention of later tokens, if only a little. So the mean attention of a slice of the
chunk is first computed at once as if the slice evicted nothing, and the scan walks through it, which takes a fraction
of the time. Then it is computed as if the evictions of that walk were true, and so on. Where a walk evicts what was
assumed, its attention is that of the definition, from the first token to the last, and so are its evictions. Where no
round does, the weights of the slice are walked through as without rounds.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.assumed import assume_kernel
from msrnn.backends.triton.common import lower_limits
from msrnn.backends.triton.tiles import (
    FAR,
    LAST,
    add_attention,
    count,
    evict,
    find_expired,
    find_seen,
    load_tile,
    rank,
    remember,
    skip_rows,
    store_importance,
)
from msrnn.bound import Bound
from msrnn.core.slots import HELD

TILE = 2**14  # weights of one tile, heads by candidates
WARPS = 4
LEAST_WIDTH = 64  # whole blocks of the kernels that write and read weights
SLICE, ROUNDS = 64, 4  # two or three rounds settle nearly all slices; those that are not needed take 2 µs each
MOST_GROUPS, LEAST_HEADS, LEAST_TOKENS = 32, 4, 32  # of chunks that are read in rounds
MOST_CANDIDATES = 2**12 + 2**8  # more would take more threads or shared memory than a program may have
WALKED_AHEAD = 4  # stages of a walk through means
TILES_AHEAD = tl.constexpr(3)  # stages of a walk through weights that do not fit into shared memory for a whole token
A_WARP = 256  # candidates of a warp in a walk through means, as a rule
SPARE = 34 * 2**10  # bytes of shared memory that are not used for loading ahead; reductions take up to 2**15 + 4


@triton.jit
def _load_means(p_row, left, right):
    return tl.load(p_row + left.o_n), tl.load(p_row + right.o_n)


@triton.jit
def _differs(tile, p_assumed, N):
    """Whether it evicts what was not assumed."""
    b_assumed = tl.load(p_assumed + tile.o_n, mask=tile.o_n < N, other=FAR)
    return count((tile.b_evicted != b_assumed) & (tile.o_n < N)) > 0


@triton.jit
def _scan_group(
    i_b, i_g, weights, means, settled, position, importance, query_position, sinks, row_weight, protected, fewer,
    start_at, assumed_at, evicted_at, decay, size, first, recent, window, spared, begin, end, C, N,
    G: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    LIFTS: tl.constexpr, STAGES: tl.constexpr, SLIDING: tl.constexpr,
):  # fmt: skip
    OBSERVES: tl.constexpr = weights is not None or means is not None
    SKIPS: tl.constexpr = (LIFTS or not OBSERVES) and window is None
    WIDTH: tl.constexpr = BN + BR
    decay = tl.cast(decay, tl.float32)
    size, recent = lower_limits(size, recent, fewer, i_b)
    i_group = i_b * G + i_g
    o_group, p_t = i_group * N, query_position + i_b * C
    p_position, p_importance, p_evicted = position + o_group, importance + o_group, evicted_at + o_group
    p_start = None if start_at is None else start_at + o_group
    left = load_tile(p_position, p_importance, p_start, protected, i_b, tl.arange(0, BN), N, OBSERVES)
    right = load_tile(p_position, p_importance, p_start, protected, i_b, BN + tl.arange(0, BR), N, OBSERVES)
    b_weight_l, b_weight_r = None, None
    if row_weight is not None:
        b_weight_l = tl.load(row_weight + o_group + left.o_n, mask=left.o_n < N, other=0.0)
        b_weight_r = tl.load(row_weight + o_group + right.o_n, mask=right.o_n < N, other=0.0)
    # The last C candidates are new, one for each row.
    old = N - C + begin
    held = count(left.m_present & (left.o_n < old)) + count(right.m_present & (right.o_n < old))
    if SKIPS:
        begin, held = skip_rows(p_t, held, size, begin, C, BC)
    for i in tl.range(begin, end, num_stages=STAGES):
        t = tl.load(p_t + i, mask=i < C, other=-1)
        if window is not None:
            m_l = find_expired(left, t, window, spared, SLIDING)
            m_r = find_expired(right, t, window, spared, SLIDING)
            left, right = evict(left, m_l, t - 1), evict(right, m_r, t - 1)
            held -= count(m_l) + count(m_r)
        held += (t >= 0).to(tl.int32)
        if OBSERVES:
            if means is not None:
                b_l, b_r = _load_means(means + (i_group * BC + i) * WIDTH, left, right)
            else:
                b_l, b_r = tl.zeros([BN], tl.float32), tl.zeros([BR], tl.float32)
                i_row, m_l, m_r = (i_group * BC + i) * M, find_seen(left, t), find_seen(right, t)
                if STAGES > 1:
                    for start in tl.static_range(0, M, BM):
                        b_l, b_r = add_attention(
                            b_l, b_r, left.o_n, right.o_n, m_l, m_r, None, None, weights, sinks, i_row, start,
                            M, BM, WIDTH, LIFTS,
                        )  # fmt: skip
                else:  # the weights of a token do not fit into shared memory, but a tile does
                    for start in tl.range(0, M, BM, num_stages=TILES_AHEAD):
                        b_l, b_r = add_attention(
                            b_l, b_r, left.o_n, right.o_n, m_l, m_r, None, None, weights, sinks, i_row, start,
                            M, BM, WIDTH, LIFTS,
                        )  # fmt: skip
            left, right = remember(left, b_l, t, decay, LIFTS), remember(right, b_r, t, decay, LIFTS)
        b_rank_l = rank(left, b_weight_l, t, first, recent, OBSERVES)
        b_rank_r = rank(right, b_weight_r, t, first, recent, OBSERVES)
        least = tl.minimum(tl.min(b_rank_l, axis=0), tl.min(b_rank_r, axis=0))
        evicts = (held > size) & (t >= 0) & (least != LAST)
        held -= evicts.to(tl.int32)
        least = tl.where(evicts, least, -1)
        left, right = evict(left, b_rank_l == least, t), evict(right, b_rank_r == least, t)
    settles = True
    if means is not None:
        p_assumed = assumed_at + o_group
        settles = (_differs(left, p_assumed, N) | _differs(right, p_assumed, N)) == 0
        tl.store(settled + i_group, settles.to(tl.int32))
    tl.store(p_evicted + left.o_n, left.b_evicted, mask=left.o_n < N)
    tl.store(p_evicted + right.o_n, right.b_evicted, mask=right.o_n < N)
    if OBSERVES and settles:  # the next round begins with the importances of before
        store_importance(left, p_importance, N, LIFTS)
        store_importance(right, p_importance, N, LIFTS)


@triton.jit(do_not_specialize=["begin", "end", "C", "N", "size", "first", "recent", "window", "spared"])
def scan_kernel(
    weights, means, settled, position, importance, query_position, sinks, row_weight, protected, fewer,
    start_at, assumed_at, evicted_at, decay, size, first, recent, window, spared, begin, end, C, N,
    G: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    LIFTS: tl.constexpr, STAGES: tl.constexpr, SLIDING: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Walk through the weights of tokens from `begin` to `end`, or in a round through their `means`: mean attention.

    The means assume the eviction times `assumed_at`, which is None otherwise; `start_at` has those of tokens before
    `begin`, or is None where none has evicted. `settled` [B, G] says whether a round has assumed what it then evicts;
    it is None without rounds, and unknown at the INITIAL one. Without weights and means nothing is observed; sinks,
    row_weight, protected, fewer and window may be None, too.
    """
    i_b, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pending = True
    if settled is not None and not INITIAL:
        pending = tl.load(settled + i_b * G + i_g) == 0
    if pending:
        _scan_group(
            i_b, i_g, weights, means, settled, position, importance, query_position, sinks, row_weight, protected,
            fewer, start_at, assumed_at, evicted_at, decay, size, first, recent, window, spared, begin, end, C, N,
            G, M, BC, BM, BN, BR, LIFTS, STAGES, SLIDING,
        )  # fmt: skip


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


def pays(groups: int, heads: int, tokens: int, candidates: int) -> bool:
    """Whether rounds take less time: not where many groups fill the GPU, or where there are few weights to walk by."""
    fits = candidates <= MOST_CANDIDATES
    return fits and groups <= MOST_GROUPS and heads >= LEAST_HEADS and tokens >= LEAST_TOKENS


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
    space, policy = room(C, N), bound.policy
    M = weights.shape[3] if weights is not None else 1
    query_position, evicted_at = query_position.contiguous(), torch.empty_like(position)
    shape = {"G": G, "M": M, "BC": space.rows, "BN": space.left, "BR": space.right, "LIFTS": policy.decay == 0}
    heads = max(1, min(triton.next_power_of_2(M), triton.next_power_of_2(TILE // space.width + 1) // 2))
    row_bytes, room_ahead = 4 * space.width, _shared_memory(position.device) - SPARE
    ahead = 1 + min(2, room_ahead // (row_bytes * triton.cdiv(M, heads) * heads))
    while ahead == 1 and heads > 1 and TILES_AHEAD.value * row_bytes * heads > room_ahead:
        heads //= 2
    about = position, importance, query_position, sinks, row_weight, protected, fewer
    limits = policy.decay or 0.0, bound.size, policy.first, bound.recent, bound.window, bound.spared
    walk = partial(scan_kernel[(B, G)], SLIDING=bound.sliding, **shape)
    weigh: dict[str, Any] = {"BM": heads, "STAGES": ahead, "INITIAL": False, "num_warps": WARPS}
    if policy.decay is None or not pays(B * G, M, C, space.width):
        weights = None if policy.decay is None else weights
        walk(weights, None, None, *about, None, None, evicted_at, *limits, 0, space.rows, C, N, **weigh)
        return evicted_at
    assert weights is not None
    settled, means = torch.empty_like(position[..., 0]), torch.empty_like(weights[..., 0, :])
    skips, warps = policy.decay == 0 and bound.window is None, max(WARPS, triton.cdiv(space.width, A_WARP))
    begins, start = range(0, space.rows, SLICE), torch.full_like(evicted_at, HELD)
    times = [evicted_at, torch.empty_like(evicted_at)]  # those before a slice, and those that it finds, in turns
    for left, begin in zip(reversed(range(len(begins))), begins, strict=True):
        end, found = min(begin + SLICE, space.rows), times[left % 2]
        for initial in [True] + [False] * (ROUNDS - 1):
            assumed = start if initial else found
            assume_kernel[(end - begin, G, B)](
                weights, sinks, position, query_position, assumed, settled, fewer, means, bound.size, begin, C, N,
                **shape, BM=heads, SKIPS=skips, INITIAL=initial, num_warps=WARPS,
            )  # fmt: skip
            walk(
                None, means, settled, *about, start, assumed, found, *limits, begin, end, C, N,
                BM=1, STAGES=WALKED_AHEAD, INITIAL=initial, num_warps=triton.next_power_of_2(warps),
            )  # fmt: skip
        walk(weights, None, settled, *about, start, None, found, *limits, begin, end, C, N, **weigh)
        start = found
    return evicted_at
