"""The eviction scan with re-rotated keys as a CPU loop; `scan_repositioned_torch` is the reference.

A key is turned anew, from how it was written, only when it has moved against where it was turned to last. Scores know
differences alone, so when a token leaves, either those before it or those behind it may be the ones that move.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy import float32 as f32
from numpy import float64 as f64
from numpy import int32 as i32
from torch import Tensor

from msrnn.backends.numba.decode import cap, dots
from msrnn.backends.numba.jit import compiled
from msrnn.backends.numba.rope import apart, layout, rotate, spacing_code, turn
from msrnn.backends.numba.scan import (
    PER_UNIT,
    Array,
    attend_row,
    decay_code,
    expire,
    highest,
    least_important,
    observe,
    weigh,
)
from msrnn.core.scores import Scoring
from msrnn.core.slots import HELD
from msrnn.policy import Bound


@compiled()
def enter(j: int, order: Array, held: int, place: Array, position: Array, kind: int, limit: float, fn: Any) -> int:
    """A token that is younger than all that are held stands behind them; how many are held then."""
    place[j] = 0.0
    if held:
        before = order[held - 1]
        place[j] = place[before] + apart(position[j] - position[before], kind, limit, fn)
    order[held] = j
    return held + 1


@compiled()
def leave(j: int, order: Array, held: int, place: Array, position: Array, kind: int, limit: float, fn: Any) -> int:
    """Close the ranks, and move the fewer of those before and behind, so that the two that meet stand right.

    Where the gaps are near, nobody moves: the shift is exactly 0.
    """
    rank = 0
    while rank < held - 1 and order[rank] != j:
        rank += 1
    if 0 < rank < held - 1:
        before, at, behind = position[order[rank - 1]], position[j], position[order[rank + 1]]
        shift = apart(behind - before, kind, limit, fn) - (
            apart(at - before, kind, limit, fn) + apart(behind - at, kind, limit, fn)
        )
        if rank < held - 1 - rank:
            for r in range(rank):
                place[order[r]] -= shift
        else:
            for r in range(rank + 1, held):
                place[order[r]] += shift
    for r in range(rank, held - 1):
        order[r] = order[r + 1]
    return held - 1


@compiled()
def follow(
    keys: Array,
    frequency: Array,
    start: int,
    step: int,
    position: Array,
    moved: Array,
    place: Array,
    turned_to: Array,
    turned: Array,
    cos: Array,
    sin: Array,
) -> None:
    """Turn the keys [members, N, D] of those among `moved` that do not stand where they were turned to."""
    for j in moved:
        if turned_to[j] != place[j]:
            turn(frequency, position[j], place[j], cos, sin)
            for k in range(keys.shape[0]):
                rotate(keys[k, j], start, step, cos, sin, turned[k, j])
            turned_to[j] = place[j]


@compiled()
def _walk(
    query: Array,
    keys: Array,
    frequency: Array,
    position: Array,
    importance: Array,
    query_position: Array,
    sinks: Array,
    norm: Array,
    attention: Array,
    evicted_at: Array,
    scale: f32,
    softcap: f32,
    start: int,
    step: int,
    kind: int,
    limit: float,
    fn: Any,
    size: int,
    first: i32,
    recent: i32,
    window: i32,
    spared: i32,
    decay: f32,
) -> None:
    (B, K, R, C, D), (_, G, N), F = query.shape, position.shape, frequency.shape[0]
    members = K // G  # KV heads of a group
    M = members * R
    cos, sin, newest = np.empty(F, f32), np.empty(F, f32), np.empty((R, D), f32)
    scratch, observed = np.empty(N, f32), np.empty(N, f32)
    for b in range(B):
        first_new = HELD
        for t in query_position[b]:
            first_new = min(first_new, t) if t >= 0 else first_new
        for g in range(G):
            kv, where = g * members, position[b, g]
            turned = np.zeros((members, N, D), f32)
            place, turned_to = np.zeros(N, f64), np.full(N, np.nan, f64)
            present, order, held = np.zeros(N, f32), np.empty(N, np.int64), 0
            for j in np.argsort(where):
                if 0 <= where[j] < first_new:
                    present[j] = f32(1.0)
                    held = enter(j, order, held, place, where, kind, limit, fn)
            for i in range(C):
                n, t = N - C + i + 1, query_position[b, i]  # later columns are later tokens
                if t < 0:
                    continue
                new = n - 1
                while new > 0 and where[new] != t:  # a single token lies in a slot, not behind them
                    new -= 1
                present[new] = f32(1.0)
                held = enter(new, order, held, place, where, kind, limit, fn)
                if window > 0:
                    oldest = 0
                    while oldest < held and where[order[oldest]] < spared:
                        oldest += 1
                    for _ in range(expire(where[:n], present[:n], evicted_at[b, g, :n], spared, t - window, t)):
                        held = leave(order[oldest], order, held, place, where, kind, limit, fn)
                own, moved = keys[b, kv : kv + members], order[:held]
                follow(own, frequency, start, step, where, moved, place, turned_to, turned, cos, sin)
                turn(frequency, t, place[new], cos, sin)
                for k in range(members):
                    for r in range(R):
                        rotate(query[b, kv + k, r, i], start, step, cos, sin, newest[r])
                    dots(newest, turned[k, :n], scale, attention[b, g, k * R : (k + 1) * R, i, :n])
                if softcap > f32(0.0):
                    cap(attention[b, g, :, i, :n], softcap)
                observed[:n] = f32(0.0)
                for m in range(M):
                    row, sink = attention[b, g, m, i, :n], sinks[g, m] if sinks.shape[0] else f32(-np.inf)
                    attend_row(row, highest(row, present, sink), sink, present[:n], scratch[:n], observed[:n])
                observe(importance[b, g, :n], observed[:n], present[:n], where[:n], decay, M)
                if held > size:
                    ranked = importance[b, g, :n]
                    if norm.shape[0]:
                        weigh(ranked, norm[b, g, :n], scratch[:n])
                        ranked = scratch[:n]
                    j = least_important(ranked, present[:n], where[:n], first, t - recent)
                    held = leave(j, order, held, place, where, kind, limit, fn)
                    present[j] = f32(0.0)
                    evicted_at[b, g, j] = t


def scan_repositioned_numba(
    query: Tensor,
    keys: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    scoring: Scoring,
    norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    (B, K, R, C, _), (_, G, N), places = query.shape, position.shape, scoring.places
    assert places is not None
    code = spacing_code(places.spacing)
    sinks = scoring.sinks_of(G)
    attention = torch.zeros(B, G, K * R // G, C, N, dtype=torch.float32)
    evicted_at = torch.full(position.shape, HELD, dtype=torch.int32)
    _walk(
        query.float().contiguous().numpy(),
        keys.float().contiguous().numpy(),
        places.rotary.frequency.numpy(),
        position.contiguous().numpy(),
        importance.numpy(),
        query_position.contiguous().numpy(),
        sinks.numpy() if sinks is not None else np.empty((0, 0), f32),
        norm.numpy() if norm is not None else np.empty((0, 0, 0), f32),
        attention.numpy(),
        evicted_at.numpy(),
        f32(scoring.scale),
        f32(scoring.softcap or 0.0),
        *layout(places.rotary),
        code.kind,
        code.limit,
        code.own.pointer,
        bound.size,
        i32(bound.policy.first),
        i32(bound.recent),
        i32(bound.window or 0),
        i32(bound.spared),
        decay_code(bound),
    )
    code.own.check()
    if bound.policy.decay == 0:
        importance.mul_(float(PER_UNIT))
    return attention, evicted_at
