"""The eviction scan as a compiled CPU loop; `msrnn.backends.torch.scan_torch` is its reference.

The walk over a chunk's rows is sequential, everything inside a row is vectorised: reductions may be reassociated,
NaN and infinity keep their meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy import float32 as f32
from numpy import int32 as i32
from torch import Tensor

from msrnn.backends.numba.jit import compiled
from msrnn.core.slots import HELD
from msrnn.policy import Bound

Array = np.ndarray[Any, Any]

NO_DECAY = f32(-1.0)  # stands for decay=None: importance is the position itself
# Exponentials are taken 2**108 times as large as they are, so that they stay normal numbers down to 162 below `top`,
# and up to 2**20 of them can be summed. Where all that is present lies 15 below `top`, a row is done again with its
# true maximum. What is observed is attention times 2**86: ranks stay apart down to 147 below the maximum of a row.
LIFT = 108
LOWEST = f32(-162.0)
VANISHED = UNIT = f32(2.0**86)
PER_UNIT = f32(2.0**-86)
SMALLEST = f32(2.0**-40)  # that is still a normal number as attention
LANES = {"reassoc", "contract", "nsz"}
_LOG2E, _LN2_HIGH, _LN2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
_C7, _C6, _C5, _C4, _C3 = f32(1 / 5040), f32(1 / 720), f32(1 / 120), f32(1 / 24), f32(1 / 6)
_EXPONENT = i32((127 + LIFT) << 23)


@compiled(fastmath={"contract"})
def lifted_exp(x: f32) -> f32:
    """2**LIFT * exp(min(x, 0)) to two units in the last place; math.exp would keep the loop around it from vectorising.

    NaN stays NaN: both comparisons are false.
    """
    x = LOWEST if x < LOWEST else x
    x = f32(0.0) if x > f32(0.0) else x
    n = np.floor(x * _LOG2E + f32(0.5))
    x = x - n * _LN2_HIGH
    x = x - n * _LN2_LOW
    p = _C7
    p = p * x + _C6
    p = p * x + _C5
    p = p * x + _C4
    p = p * x + _C3
    p = p * x + f32(0.5)
    p = p * x + f32(1.0)
    p = p * x + f32(1.0)
    return p * i32(i32(n * f32(8388608.0)) + _EXPONENT).view(f32)  # times 2**(n + LIFT), by its exponent bits


@compiled(fastmath=LANES)
def _exponentials(scores: Array, top: f32, present: Array, into: Array) -> f32:
    """Lifted, and 0 for what is not present, whatever its score."""
    total = f32(0.0)
    for j in range(scores.shape[0]):
        e = lifted_exp(scores[j] - top)
        e = e if present[j] > f32(0.0) else f32(0.0)
        into[j] = e
        total += e
    return total


@compiled()
def highest(scores: Array, present: Array, sink: f32) -> f32:
    """The maximum of what is present, NaN left out."""
    top = sink
    for j in range(scores.shape[0]):
        if present[j] > f32(0.0) and scores[j] > top:
            top = scores[j]
    return top


@compiled(fastmath={"contract"})
def _share(total: f32) -> f32:
    """Never reassociated, which would multiply exponentials by UNIT first, and overflow."""
    return UNIT / total


@compiled(fastmath=LANES)
def attend_row(scores: Array, top: f32, sink: f32, present: Array, scratch: Array, observed: Array) -> None:
    """One head's scores become its attention over the present candidates; times UNIT, it is added to `observed`.

    `top` bounds the scores from above. Where only states that were evicted come near it, or where it is NaN, the true
    maximum is found. A score that is NaN and present makes the whole row NaN.
    """
    total = _exponentials(scores, top, present, scratch) + lifted_exp(sink - top)
    if not total > VANISHED:
        top = highest(scores, present, sink)
        total = _exponentials(scores, top, present, scratch) + lifted_exp(sink - top)
    share = _share(total)
    for j in range(scores.shape[0]):
        a = scratch[j] * share
        scores[j] = f32(0.0) if a < SMALLEST else a * PER_UNIT
        observed[j] += a


@compiled(fastmath=LANES)
def expire(position: Array, present: Array, evicted_at: Array, spared: i32, last: i32, t: i32) -> int:
    """States from `spared` to `last` leave as token t, which no longer sees them, is appended; how many did."""
    left = 0
    for j in range(position.shape[0]):
        if present[j] > f32(0.0) and spared <= position[j] <= last:
            present[j] = f32(0.0)
            evicted_at[j] = t - i32(1)
            left += 1
    return left


@compiled(fastmath=LANES)
def observe(importance: Array, observed: Array, present: Array, position: Array, decay: f32, heads: int) -> None:
    """The importances after a token, and 0 for what is not present; in units of UNIT where decay is 0."""
    if decay == NO_DECAY:
        for j in range(position.shape[0]):
            importance[j] = f32(position[j])
        return
    # Importances that are stored are sums of attention as it is; those of the newest query alone keep the wider range,
    # and nothing of before, which may be NaN.
    if decay == f32(0.0):
        mean = f32(1.0) / f32(heads)
        for j in range(position.shape[0]):
            importance[j] = observed[j] * mean if present[j] > f32(0.0) else f32(0.0)
        return
    mean = PER_UNIT / f32(heads)
    for j in range(position.shape[0]):
        updated = decay * importance[j] + observed[j] * mean
        importance[j] = updated if present[j] > f32(0.0) else f32(0.0)


@compiled(fastmath=LANES)
def weigh(importance: Array, norm: Array, into: Array) -> None:
    for j in range(importance.shape[0]):
        into[j] = importance[j] * norm[j]


@compiled()
def least_important(importance: Array, present: Array, position: Array, oldest: i32, newest: i32) -> int:
    """The candidate to evict, among positions oldest..newest; ties go to the older, and NaN counts as infinity."""
    least, lowest, age = -1, f32(np.inf), i32(HELD)
    for j in range(position.shape[0]):
        if present[j] > f32(0.0) and oldest <= position[j] <= newest:
            rank = f32(np.inf) if np.isnan(importance[j]) else importance[j]
            if rank < lowest or (rank == lowest and position[j] < age):
                least, lowest, age = j, rank, position[j]
    if least < 0:
        raise ValueError("this state holds too many tokens, or some twice: read the text anew, or load another state")
    return least


@compiled()
def _scan(
    scores: Array,
    tops: Array,
    position: Array,
    importance: Array,
    query_position: Array,
    sinks: Array,
    norm: Array,
    evicted_at: Array,
    size: int,
    first: i32,
    recent: i32,
    window: i32,
    spared: i32,
    decay: f32,
) -> None:
    B, G, M, C, N = scores.shape
    scratch, observed = np.empty(N, f32), np.empty(N, f32)
    for b in range(B):
        for g in range(G):
            present = np.zeros(N, f32)
            held = 0
            for j in range(N - C):
                if position[b, g, j] >= 0:
                    present[j] = f32(1.0)
                    held += 1
            for i in range(C):
                n = N - C + i + 1  # later columns are later tokens
                t = query_position[b, i]
                if t < 0:
                    scores[b, g, :, i] = f32(0.0)
                    continue
                if position[b, g, n - 1] >= 0:
                    present[n - 1] = f32(1.0)
                    held += 1
                if window > 0:
                    held -= expire(position[b, g, :n], present[:n], evicted_at[b, g, :n], spared, t - window, t)
                observed[:n] = f32(0.0)
                for m in range(M):
                    sink = sinks[g, m] if sinks.shape[0] else f32(-np.inf)
                    attend_row(scores[b, g, m, i, :n], tops[b, g, m, i], sink, present[:n], scratch[:n], observed[:n])
                    scores[b, g, m, i, n:] = f32(0.0)
                observe(importance[b, g, :n], observed[:n], present[:n], position[b, g, :n], decay, M)
                if held > size:
                    ranked = importance[b, g, :n]
                    if norm.shape[0]:
                        weigh(ranked, norm[b, g, :n], scratch[:n])
                        ranked = scratch[:n]
                    j = least_important(ranked, present[:n], position[b, g, :n], first, t - recent)
                    present[j] = f32(0.0)
                    evicted_at[b, g, j] = t
                    held -= 1


def decay_code(bound: Bound) -> f32:
    return NO_DECAY if bound.policy.decay is None else f32(bound.policy.decay)


def scan_numba(
    scores: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    sinks: Tensor | None = None,
    norm: Tensor | None = None,
) -> Tensor:
    evicted_at = torch.full(position.shape, HELD, dtype=torch.int32)
    tops = scores.amax(-1)
    if sinks is not None:
        tops = torch.maximum(tops, sinks[None, :, :, None])
    _scan(
        scores.numpy(),
        tops.numpy(),
        position.contiguous().numpy(),
        importance.numpy(),
        query_position.contiguous().numpy(),
        sinks.numpy() if sinks is not None else np.empty((0, 0), f32),
        norm.numpy() if norm is not None else np.empty((0, 0, 0), f32),
        evicted_at.numpy(),
        bound.size,
        i32(bound.policy.first),
        i32(bound.recent),
        i32(bound.window or 0),
        i32(bound.spared),
        decay_code(bound),
    )
    if bound.policy.decay == 0:
        importance.mul_(float(PER_UNIT))
    return evicted_at
