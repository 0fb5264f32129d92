"""The walk that scores its own rows as a compiled CPU loop; `msrnn.walk.walk_torch` is its reference.

A key is turned anew, from how it was written, only when it has moved against where it was turned to last. Scores know
differences alone, so when a token leaves, either those before it or those behind it may be the ones that move.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy import float32 as f32
from numpy import float64 as f64
from numpy import int32 as i32
from torch import Tensor

from msrnn.kernels.decode_cpu import cap, dots
from msrnn.kernels.scan_cpu import Array, attend_row, decay_code, expire, least_important, observe, weigh
from msrnn.kernels.turn_cpu import apart, arranged, rotate, spacing_code, turn
from msrnn.policy import Bound
from msrnn.reference import HELD
from msrnn.scoring import Scoring


@njit(cache=True, nogil=True)
def leave(rank: int, order: Array, held: int, place: Array, position: Array, kind: int, table: Array) -> None:
    """Close the ranks, and move the fewer of those before and behind, so that the two that meet stand right.

    Where the gaps are near, nobody moves: the shift is exactly 0.
    """
    if 0 < rank < held - 1:
        before, at, behind = position[order[rank - 1]], position[order[rank]], position[order[rank + 1]]
        shift = apart(behind - before, kind, table) - (
            apart(at - before, kind, table) + apart(behind - at, kind, table)
        )
        if rank < held - 1 - rank:
            for r in range(rank):
                place[order[r]] -= shift
        else:
            for r in range(rank + 1, held):
                place[order[r]] += shift
    for r in range(rank, held - 1):
        order[r] = order[r + 1]


@njit(cache=True, nogil=True)
def _walk(
    query: Array,
    keys: Array,
    frequency: Array,
    table: Array,
    position: Array,
    importance: Array,
    query_position: Array,
    sinks: Array,
    norm: Array,
    attention: Array,
    evicted_at: Array,
    scale: f32,
    softcap: f32,
    kind: int,
    size: int,
    first: i32,
    recent: i32,
    window: i32,
    decay: f32,
) -> None:
    (B, K, R, C, D), (_, G, N), F = query.shape, position.shape, frequency.shape[0]
    members = K // G  # KV heads of a group
    M = members * R
    cos, sin = np.empty(F, f32), np.empty(F, f32)
    newest = np.empty((R, D), f32)
    scores, scratch, observed = np.empty((M, N), f32), np.empty(N, f32), np.empty(N, f32)
    for b in range(B):
        first_new = HELD
        for t in query_position[b]:
            first_new = min(first_new, t) if t >= 0 else first_new
        for g in range(G):
            where = position[b, g]
            turned = np.zeros((members, N, D), f32)
            place, turned_to = np.zeros(N, f64), np.full(N, np.nan, f64)
            present, order = np.zeros(N, f32), np.empty(N, np.int64)
            held = 0
            for j in np.argsort(where):
                if 0 <= where[j] < first_new:
                    present[j], order[held] = f32(1.0), j
                    if held:
                        before = order[held - 1]
                        place[j] = place[before] + apart(where[j] - where[before], kind, table)
                    held += 1
            for i in range(C):
                n, t = N - C + i + 1, query_position[b, i]  # later columns are later tokens
                if t < 0:
                    continue
                new = n - 1
                while where[new] != t:  # in a slot, and not behind them
                    new -= 1
                present[new], order[held] = f32(1.0), new
                place[new] = 0.0
                if held:
                    before = order[held - 1]
                    place[new] = place[before] + apart(t - where[before], kind, table)
                held += 1
                if window > 0:
                    gone = expire(where[:n], present[:n], evicted_at[b, g, :n], t, window)
                    for r in range(gone, held):  # the oldest come first
                        order[r - gone] = order[r]
                    held -= gone
                for r in range(held):
                    j = order[r]
                    if turned_to[j] != place[j]:
                        turn(frequency, where[j], place[j], cos, sin)
                        for local in range(members):
                            rotate(keys[b, g * members + local, j], cos, sin, turned[local, j])
                        turned_to[j] = place[j]
                turn(frequency, t, place[new], cos, sin)
                for local in range(members):
                    for r in range(R):
                        rotate(query[b, g * members + local, r, i], cos, sin, newest[r])
                    dots(newest, turned[local, :n], scale, scores[local * R : (local + 1) * R, :n])
                if softcap > f32(0.0):
                    cap(scores[:, :n], softcap)
                observed[:n] = f32(0.0)
                for m in range(M):
                    row = attention[b, g, m, i, :n]
                    top = sink = sinks[g, m] if sinks.shape[0] else f32(-np.inf)
                    for j in range(n):
                        row[j] = scores[m, j]
                        if present[j] > f32(0.0) and row[j] > top:
                            top = row[j]
                    attend_row(row, top, sink, present[:n], scratch[:n], observed[:n])
                observe(importance[b, g, :n], observed[:n], present[:n], where[:n], decay, M)
                if held > size:
                    ranked = importance[b, g, :n]
                    if norm.shape[0]:
                        weigh(ranked, norm[b, g, :n], scratch[:n])
                        ranked = scratch[:n]
                    j = least_important(ranked, present[:n], where[:n], first, t - recent)
                    rank = 0
                    while order[rank] != j:
                        rank += 1
                    leave(rank, order, held, place, where, kind, table)
                    present[j] = f32(0.0)
                    evicted_at[b, g, j] = t
                    held -= 1


def walk_cpu(
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
    kind, table = spacing_code(places.spacing, int(query_position.max()))
    sinks = scoring.sinks_of(G)
    attention = torch.zeros(B, G, K * R // G, C, N)
    evicted_at = torch.full(position.shape, HELD, dtype=torch.int32)
    _walk(
        arranged(query, places.rotary).numpy(),
        arranged(keys, places.rotary).numpy(),
        places.rotary.frequency.numpy(),
        table,
        position.contiguous().numpy(),
        importance.numpy(),
        query_position.contiguous().numpy(),
        sinks.numpy() if sinks is not None else np.empty((0, 0), f32),
        norm.numpy() if norm is not None else np.empty((0, 0, 0), f32),
        attention.numpy(),
        evicted_at.numpy(),
        f32(scoring.scale),
        f32(scoring.softcap or 0.0),
        kind,
        bound.size,
        i32(bound.policy.first),
        i32(bound.recent),
        i32(bound.window or 0),
        decay_code(bound),
    )
    return attention, evicted_at
