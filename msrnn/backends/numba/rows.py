"""The computation for one new token in numba: attention over the candidates, importances, and which one is evicted.

Loops over tokens are sequential; everything in this file is vectorised over the candidates of one token. Reductions may
be reassociated, and NaN and infinity keep their meaning. `importance`, `present`, `position`, `free`, `row_weight`
and `scratch` are [N], one number for each candidate. `free` is the position of a candidate, -1 where it is protected.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy import float32 as f32
from numpy import int32 as i32
from torch import Tensor

from msrnn.backends.numba.jit import compile_loop
from msrnn.bound import Bound
from msrnn.core.slots import HELD

Array = np.ndarray[Any, Any]
Scalars = tuple[int, i32, i32, i32, i32, f32, bool]  # size, first, recent, window, spared, decay, sliding of a `Bound`

NO_DECAY = f32(-1.0)  # means decay=None: importance is the position itself
# Exponentials are scaled by 2**108, so that they stay normal float32 numbers down to 162 below `top`, and 2**20 of them
# can be summed. If every present score lies 15 or more below `top`, the row is computed again with its true maximum.
# `observed` is attention times 2**86, so that ranks stay distinct down to 147 below the maximum of a row.
LIFT = 108
LOWEST = f32(-162.0)
VANISHED = UNIT = f32(2.0**86)  # VANISHED: rows with a smaller sum of exponentials are computed again
PER_UNIT = f32(2.0**-86)
SMALLEST = f32(2.0**-40)  # attention times UNIT: below, attention is not a normal float32 number, and becomes 0
LANES = {"reassoc", "contract", "nsz"}
_LOG2E, _LN2_HIGH, _LN2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
_C7, _C6, _C5, _C4, _C3 = f32(1 / 5040), f32(1 / 720), f32(1 / 120), f32(1 / 24), f32(1 / 6)
_EXPONENT = i32((127 + LIFT) << 23)


@compile_loop(fastmath={"contract"})
def lift_exp(x: f32) -> f32:
    """2**LIFT * exp(min(x, 0)) to two units in the last place; math.exp would keep the loop from vectorising.

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


@compile_loop(fastmath=LANES)
def _exponentials(scores: Array, top: f32, present: Array, into: Array) -> f32:
    """Scaled exponentials, 0 for what is not present; returns their sum."""
    total = f32(0.0)
    for j in range(scores.shape[0]):
        e = lift_exp(scores[j] - top)
        e = e if present[j] > f32(0.0) else f32(0.0)
        into[j] = e
        total += e
    return total


@compile_loop()
def highest(scores: Array, present: Array, sink: f32) -> f32:
    """The maximum of the present scores and the sink; NaN is ignored."""
    top = sink
    for j in range(scores.shape[0]):
        if present[j] > f32(0.0) and scores[j] > top:
            top = scores[j]
    return top


@compile_loop(fastmath={"contract"})
def _share(total: f32) -> f32:
    """A function of its own, so that it is never reassociated: exponentials times UNIT would overflow."""
    return UNIT / total


@compile_loop()
def _ratio(sunk: f32, total: f32) -> f32:
    """A function of its own for the same reason: 1 / total may not be a normal number."""
    return sunk / total


@compile_loop(fastmath=LANES)
def attend_row(scores: Array, top: f32, sink: f32, present: Array, scratch: Array, observed: Array) -> f32:
    """One head's scores become its attention over the present candidates; times UNIT, it is added to `observed`.

    `top` is an upper bound of the scores. The true maximum is searched only where `top` is NaN, or far above every
    present score. A present score that is NaN makes the whole row NaN. Returns the attention to the sink.
    """
    sunk = lift_exp(sink - top)
    total = _exponentials(scores, top, present, scratch) + sunk
    if not total > VANISHED:
        top = highest(scores, present, sink)
        sunk = lift_exp(sink - top)
        total = _exponentials(scores, top, present, scratch) + sunk
    share = _share(total)
    for j in range(scores.shape[0]):
        a = scratch[j] * share
        scores[j] = f32(0.0) if a < SMALLEST else a * PER_UNIT
        observed[j] += a
    taken: f32 = _ratio(sunk, total)
    return taken


@compile_loop()
def hide_protected(position: Array, ranges: Array, into: Array) -> None:
    """Positions, and -1 where one lies in a range [begin, end); ranges [RANGES, 2]."""
    into[:] = position
    for r in range(ranges.shape[0]):
        if ranges[r, 0] < ranges[r, 1]:
            for j in range(position.shape[0]):
                if ranges[r, 0] <= position[j] < ranges[r, 1]:
                    into[j] = -1


@compile_loop(fastmath=LANES)
def expire(position: Array, present: Array, evicted_at: Array, spared: i32, last: i32, t: i32) -> int:
    """Drop positions `spared` to `last`, which token t no longer sees; returns how many were dropped."""
    dropped = 0
    for j in range(position.shape[0]):
        if present[j] > f32(0.0) and spared <= position[j] <= last:
            present[j] = f32(0.0)
            evicted_at[j] = t - i32(1)
            dropped += 1
    return dropped


@compile_loop(fastmath=LANES)
def observe(importance: Array, observed: Array, present: Array, position: Array, decay: f32, heads: int) -> None:
    """The importances after a token, and 0 for what is not present; in units of UNIT where decay is 0."""
    if decay == NO_DECAY:
        for j in range(position.shape[0]):
            importance[j] = f32(position[j])
        return
    # With decay 0 nothing is stored, so importances keep the wider range of `observed`; earlier values, which may be
    # NaN, are not read.
    if decay == f32(0.0):
        mean = f32(1.0) / f32(heads)
        for j in range(position.shape[0]):
            importance[j] = observed[j] * mean if present[j] > f32(0.0) else f32(0.0)
        return
    mean = PER_UNIT / f32(heads)
    for j in range(position.shape[0]):
        updated = decay * importance[j] + observed[j] * mean
        importance[j] = updated if present[j] > f32(0.0) else f32(0.0)


@compile_loop(fastmath=LANES)
def weigh(importance: Array, row_weight: Array, into: Array) -> None:
    for j in range(importance.shape[0]):
        into[j] = importance[j] * row_weight[j]


@compile_loop()
def least_important(importance: Array, present: Array, position: Array, oldest: i32, newest: i32) -> Any:
    """The candidate to evict, among positions oldest..newest; the older one of a tie, and NaN counts as infinity."""
    least, lowest, age = -1, f32(np.inf), i32(HELD)
    for j in range(position.shape[0]):
        if present[j] > f32(0.0) and oldest <= position[j] <= newest:
            rank = f32(np.inf) if np.isnan(importance[j]) else importance[j]
            if rank < lowest or (rank == lowest and position[j] < age):
                least, lowest, age = j, rank, position[j]
    if least < 0:
        raise ValueError("this state holds too many tokens, or some twice: read the text again, or load another state")
    return least


@compile_loop()
def observe_and_evict(
    importance: Array,
    observed: Array,
    present: Array,
    position: Array,
    free: Array,
    row_weight: Array,
    scratch: Array,
    count: int,
    held: int,
    t: i32,
    heads: int,
    bound: Scalars,
) -> Any:
    """Update the importances after token t and evict the least important candidate; its index, -1 where all fit.

    The candidates are the first `count` of each array. An empty `row_weight` means that rows have no weights.
    """
    size, first, recent, _, _, decay, _ = bound
    present, position, free = present[:count], position[:count], free[:count]
    observe(importance[:count], observed[:count], present, position, decay, heads)
    if held <= size:
        return -1
    rank = importance[:count]
    if row_weight.shape[0] and decay == NO_DECAY:
        rank = row_weight[:count]
    elif row_weight.shape[0]:
        rank = scratch[:count]
        weigh(importance[:count], row_weight[:count], rank)
    j = least_important(rank, present, free, first, t - recent)
    present[j] = f32(0.0)
    return j


@compile_loop()
def lower_scalars(bound: Scalars, fewer: Array) -> Any:
    """A bound for a sequence whose size and `recent` are lower by `fewer` [2]; see `msrnn.core.own_sizes`."""
    size, first, recent, window, spared, decay, sliding = bound
    return size - fewer[0], first, i32(recent - fewer[1]), window, spared, decay, sliding


@cache
def bound_scalars(bound: Bound) -> Scalars:
    """A bound in the types of the loops."""
    first, recent, window, spared = bound.policy.first, bound.recent, bound.window or 0, bound.spared
    decay = NO_DECAY if bound.policy.decay is None else f32(bound.policy.decay)
    return bound.size, i32(first), i32(recent), i32(window), i32(spared), decay, bound.sliding


def array_or_empty(tensor: Tensor | None, dims: int) -> Array:
    """A tensor's memory, or an array without elements that stands for None."""
    return np.empty((0,) * dims, f32) if tensor is None else tensor.numpy()


def sinks_array(sinks: Tensor | None) -> Array:
    """Sinks [B, G, M, C], or none of them; contiguous, since loops are compiled again for other strides."""
    return array_or_empty(None if sinks is None else sinks.contiguous(), 4)


def fewer_array(fewer: Tensor | None, batch_size: int) -> Array:
    """What `lower_scalars` takes of each sequence, [B, 2]."""
    return np.zeros((batch_size, 2), np.int32) if fewer is None else fewer.numpy()


def ranges_array(protected: Tensor | None, batch_size: int) -> Array:
    """Protected ranges [B, RANGES, 2], or none of them."""
    return np.empty((batch_size, 0, 2), np.int32) if protected is None else protected.numpy()
