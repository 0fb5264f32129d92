"""The eviction scans as CPU loops; `scan_torch` and `scan_repositioned_torch` are the references.

With re-rotated keys, a key is rotated, from how the model wrote it, only when its new position has changed since the
last time. Scores depend on differences of positions only, so after an eviction either the older or the younger tokens
may be shifted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy import float32 as f32
from numpy import float64 as f64
from torch import Tensor

from msrnn.backends.numba.decode import cap, dots
from msrnn.backends.numba.jit import compile_loop
from msrnn.backends.numba.rope import layout, new_gap, rotate, rotation, spacing_code
from msrnn.backends.numba.rows import (
    PER_UNIT,
    Array,
    Scalars,
    array_or_empty,
    attend_row,
    bound_scalars,
    expire,
    fewer_array,
    hide_protected,
    highest,
    lower_scalars,
    observe_and_evict,
    ranges_array,
    sinks_array,
)
from msrnn.bound import Bound
from msrnn.core.scores import Scoring
from msrnn.core.slots import HELD


@compile_loop()
def _scan(
    scores: Array,
    tops: Array,
    position: Array,
    importance: Array,
    query_position: Array,
    sinks: Array,
    row_weight: Array,
    ranges: Array,
    fewer: Array,
    share: Array,
    evicted_at: Array,
    bound: Scalars,
) -> None:
    window, spared, sliding = bound[3], bound[4], bound[6]
    B, G, M, C, N = scores.shape
    scratch, observed, free = np.empty(N, f32), np.empty(N, f32), np.empty(N, np.int32)
    for b in range(B):
        own = lower_scalars(bound, fewer[b])
        for g in range(G):
            where, present = position[b, g], np.zeros(N, f32)
            hide_protected(where, ranges[b], free)
            expires = where if sliding else free
            held = 0
            for j in range(N - C):
                if where[j] >= 0:
                    present[j] = f32(1.0)
                    held += 1
            for i in range(C):
                n = N - C + i + 1  # later columns are later tokens
                t = query_position[b, i]
                if t < 0:
                    scores[b, g, :, i] = f32(0.0)
                    continue
                if where[n - 1] >= 0:
                    present[n - 1] = f32(1.0)
                    held += 1
                if window > 0:
                    held -= expire(expires[:n], present[:n], evicted_at[b, g, :n], spared, t - window, t)
                observed[:n] = f32(0.0)
                for m in range(M):
                    sink = sinks[b, g, m, i] if sinks.shape[0] else f32(-np.inf)
                    row = scores[b, g, m, i, :n]
                    taken = attend_row(row, tops[b, g, m, i], sink, present[:n], scratch[:n], observed[:n])
                    if share.shape[0]:
                        share[b, g, m, i] = taken
                    scores[b, g, m, i, n:] = f32(0.0)
                weight = row_weight[b, g] if row_weight.shape[0] else scratch[:0]
                j = observe_and_evict(
                    importance[b, g], observed, present, where, free, weight, scratch, n, held, t, M, own
                )
                if j >= 0:
                    evicted_at[b, g, j] = t
                    held -= 1


def scan_numba(
    scores: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    sinks: Tensor | None = None,
    row_weight: Tensor | None = None,
    protected: Tensor | None = None,
    share: Tensor | None = None,
    fewer: Tensor | None = None,
) -> Tensor:
    evicted_at = torch.full(position.shape, HELD, dtype=torch.int32)
    tops = scores.amax(-1)
    if sinks is not None:
        tops = torch.maximum(tops, sinks)
    _scan(
        scores.numpy(),
        tops.numpy(),
        position.contiguous().numpy(),
        importance.numpy(),
        query_position.contiguous().numpy(),
        sinks_array(sinks),
        array_or_empty(row_weight, 3),
        ranges_array(protected, position.shape[0]),
        fewer_array(fewer, position.shape[0]),
        array_or_empty(share, 4),
        evicted_at.numpy(),
        bound_scalars(bound),
    )
    if bound.policy.decay == 0:
        importance.mul_(float(PER_UNIT))
    return evicted_at


@compile_loop()
def append_token(
    j: int, order: Array, held: int, new_position: Array, position: Array, kind: int, limit: float, fn: Any
) -> int:
    """Give a token that is younger than all held ones its new position; returns how many are held then."""
    new_position[j] = 0.0
    if held:
        before = order[held - 1]
        new_position[j] = new_position[before] + new_gap(position[j] - position[before], kind, limit, fn)
    order[held] = j
    return held + 1


@compile_loop()
def remove_token(
    j: int, order: Array, held: int, new_position: Array, position: Array, kind: int, limit: float, fn: Any
) -> int:
    """Remove a token and shift the fewer of the older and the younger tokens, so that the gap it leaves is right.

    Between near neighbours the shift is exactly 0, and no key is re-rotated. Returns how many are held then.
    """
    rank = 0
    while rank < held - 1 and order[rank] != j:
        rank += 1
    if 0 < rank < held - 1:
        before, at, behind = position[order[rank - 1]], position[j], position[order[rank + 1]]
        shift = new_gap(behind - before, kind, limit, fn) - (
            new_gap(at - before, kind, limit, fn) + new_gap(behind - at, kind, limit, fn)
        )
        if rank < held - 1 - rank:
            for r in range(rank):
                new_position[order[r]] -= shift
        else:
            for r in range(rank + 1, held):
                new_position[order[r]] += shift
    for r in range(rank, held - 1):
        order[r] = order[r + 1]
    return held - 1


@compile_loop()
def rerotate_moved(
    keys: Array,
    frequency: Array,
    start: int,
    step: int,
    position: Array,
    moved: Array,
    new_position: Array,
    rotated_to: Array,
    rotated: Array,
    cos: Array,
    sin: Array,
) -> None:
    """Re-rotate the keys [members, N, D] of those tokens in `moved` whose new position has changed."""
    for j in moved:
        if rotated_to[j] != new_position[j]:
            rotation(frequency, position[j], new_position[j], cos, sin)
            for k in range(keys.shape[0]):
                rotate(keys[k, j], start, step, cos, sin, rotated[k, j])
            rotated_to[j] = new_position[j]


@compile_loop()
def _scan_repositioned(
    query: Array,
    keys: Array,
    frequency: Array,
    position: Array,
    importance: Array,
    query_position: Array,
    sinks: Array,
    row_weight: Array,
    ranges: Array,
    fewer: Array,
    share: Array,
    attention: Array,
    evicted_at: Array,
    scale: f32,
    softcap: f32,
    start: int,
    step: int,
    kind: int,
    limit: float,
    fn: Any,
    bound: Scalars,
) -> None:
    window, spared, sliding = bound[3], bound[4], bound[6]
    (B, K, R, C, D), (_, G, N), F = query.shape, position.shape, frequency.shape[0]
    members = K // G  # KV heads of a group
    M = members * R
    cos, sin, newest = np.empty(F, f32), np.empty(F, f32), np.empty((R, D), f32)
    scratch, observed, free = np.empty(N, f32), np.empty(N, f32), np.empty(N, np.int32)
    for b in range(B):
        first_new = HELD
        for t in query_position[b]:
            first_new = min(first_new, t) if t >= 0 else first_new
        lowered = lower_scalars(bound, fewer[b])
        for g in range(G):
            kv, where = g * members, position[b, g]
            hide_protected(where, ranges[b], free)
            expires = where if sliding else free
            rotated = np.zeros((members, N, D), f32)
            new_position, rotated_to = np.zeros(N, f64), np.full(N, np.nan, f64)
            present, order, held = np.zeros(N, f32), np.empty(N, np.int64), 0
            for j in np.argsort(where):
                if 0 <= where[j] < first_new:
                    present[j] = f32(1.0)
                    held = append_token(j, order, held, new_position, where, kind, limit, fn)
            for i in range(C):
                n, t = N - C + i + 1, query_position[b, i]  # later columns are later tokens
                if t < 0:
                    continue
                new = n - 1
                while new > 0 and where[new] != t:  # a single token is in a slot, not after the slots
                    new -= 1
                present[new] = f32(1.0)
                held = append_token(new, order, held, new_position, where, kind, limit, fn)
                if window > 0 and expire(expires[:n], present[:n], evicted_at[b, g, :n], spared, t - window, t):
                    oldest = 0
                    while oldest < held:
                        j = order[oldest]
                        if present[j] > f32(0.0):
                            oldest += 1
                        else:
                            held = remove_token(j, order, held, new_position, where, kind, limit, fn)
                own, moved = keys[b, kv : kv + members], order[:held]
                rerotate_moved(own, frequency, start, step, where, moved, new_position, rotated_to, rotated, cos, sin)
                rotation(frequency, t, new_position[new], cos, sin)
                for k in range(members):
                    for r in range(R):
                        rotate(query[b, kv + k, r, i], start, step, cos, sin, newest[r])
                    dots(newest, rotated[k, :n], scale, attention[b, g, k * R : (k + 1) * R, i, :n])
                if softcap > f32(0.0):
                    cap(attention[b, g, :, i, :n], softcap)
                observed[:n] = f32(0.0)
                for m in range(M):
                    row, sink = attention[b, g, m, i, :n], sinks[b, g, m, i] if sinks.shape[0] else f32(-np.inf)
                    top = highest(row, present, sink)
                    taken = attend_row(row, top, sink, present[:n], scratch[:n], observed[:n])
                    if share.shape[0]:
                        share[b, g, m, i] = taken
                weight = row_weight[b, g] if row_weight.shape[0] else scratch[:0]
                j = observe_and_evict(
                    importance[b, g], observed, present, where, free, weight, scratch, n, held, t, M, lowered
                )
                if j >= 0:
                    held = remove_token(j, order, held, new_position, where, kind, limit, fn)
                    evicted_at[b, g, j] = t


def scan_repositioned_numba(
    query: Tensor,
    keys: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    scoring: Scoring,
    row_weight: Tensor | None = None,
    protected: Tensor | None = None,
    share: Tensor | None = None,
    fewer: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    (B, K, R, C, _), (_, G, N), repositioning = query.shape, position.shape, scoring.repositioning
    assert repositioning is not None
    code = spacing_code(repositioning.spacing)
    attention = torch.zeros(B, G, K * R // G, C, N, dtype=torch.float32)
    evicted_at = torch.full(position.shape, HELD, dtype=torch.int32)
    _scan_repositioned(
        query.float().contiguous().numpy(),
        keys.float().contiguous().numpy(),
        repositioning.rope.frequency.numpy(),
        position.contiguous().numpy(),
        importance.numpy(),
        query_position.contiguous().numpy(),
        sinks_array(scoring.sinks_of(B, G, C)),
        array_or_empty(row_weight, 3),
        ranges_array(protected, B),
        fewer_array(fewer, B),
        array_or_empty(share, 4),
        attention.numpy(),
        evicted_at.numpy(),
        f32(scoring.scale),
        f32(scoring.softcap or 0.0),
        *layout(repositioning.rope),
        code.kind,
        code.limit,
        code.own.pointer,
        bound_scalars(bound),
    )
    code.own.check()
    if bound.policy.decay == 0:
        importance.mul_(float(PER_UNIT))
    return attention, evicted_at
