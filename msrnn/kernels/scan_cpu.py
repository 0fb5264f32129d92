"""The eviction scan as a compiled CPU loop; `msrnn.scan.scan_torch` is its reference.

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

from msrnn.kernels.jit import compiled
from msrnn.policy import Bound
from msrnn.reference import HELD

Array = np.ndarray[Any, Any]

NO_DECAY = f32(-1.0)  # stands for decay=None: importance is the position itself
VANISHED = f32(1e-30)  # a sum of exponentials so small that its terms have lost digits
LANES = {"reassoc", "contract", "nsz"}
_LOG2E, _LN2_HIGH, _LN2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
_C7, _C6, _C5, _C4, _C3 = f32(1 / 5040), f32(1 / 720), f32(1 / 120), f32(1 / 24), f32(1 / 6)


@compiled(fastmath={"contract"})
def exp_not_above_zero(x: f32) -> f32:
    """exp(min(x, 0)) to two units in the last place; math.exp would keep the loop around it from vectorising."""
    x = min(max(x, f32(-87.0)), f32(0.0))
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
    return p * i32(i32(n * f32(8388608.0)) + i32(1065353216)).view(f32)  # times 2**n, by its exponent bits


@compiled(fastmath=LANES)
def _exponentials(scores: Array, top: f32, present: Array, into: Array) -> f32:
    total = f32(0.0)
    for j in range(scores.shape[0]):
        e = exp_not_above_zero(scores[j] - top) * present[j]
        into[j] = e
        total += e
    return total


@compiled(fastmath=LANES)
def attend_row(scores: Array, top: f32, sink: f32, present: Array, scratch: Array, observed: Array) -> None:
    """One head's scores become its attention over the present candidates and are added to what the group observed.

    `top` bounds the scores from above. Where only states that have left come near it, the true maximum is found.
    """
    total = _exponentials(scores, top, present, scratch) + exp_not_above_zero(sink - top)
    if not total > VANISHED:
        top = sink
        for j in range(scores.shape[0]):
            if present[j] > f32(0.0) and scores[j] > top:
                top = scores[j]
        total = _exponentials(scores, top, present, scratch) + exp_not_above_zero(sink - top)
    share = f32(1.0) / total
    for j in range(scores.shape[0]):
        a = scratch[j] * share
        scores[j] = a
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
    if decay == NO_DECAY:
        for j in range(position.shape[0]):
            importance[j] = f32(position[j])
        return
    mean = f32(1.0) / f32(heads)
    for j in range(position.shape[0]):
        importance[j] = (decay * importance[j] + observed[j] * mean) * present[j]


@compiled(fastmath=LANES)
def weigh(importance: Array, norm: Array, into: Array) -> None:
    for j in range(importance.shape[0]):
        into[j] = importance[j] * norm[j]


@compiled()
def least_important(importance: Array, present: Array, position: Array, oldest: i32, newest: i32) -> int:
    """The candidate that leaves, among positions oldest..newest; ties go to the older."""
    least = -1
    for j in range(position.shape[0]):
        if present[j] > f32(0.0) and oldest <= position[j] <= newest:
            less = least < 0 or importance[j] < importance[least]
            if less or (importance[j] == importance[least] and position[j] < position[least]):
                least = j
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


def scan_cpu(
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
    return evicted_at
