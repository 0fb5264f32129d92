"""The eviction scan as a CPU loop; `scan_torch` is the reference."""

from __future__ import annotations

import numpy as np
import torch
from numpy import float32 as f32
from numpy import int32 as i32
from torch import Tensor

from msrnn.backends.numba.jit import compiled
from msrnn.backends.numba.rows import (
    PER_UNIT,
    Array,
    array_or_empty,
    attend_row,
    bound_scalars,
    expire,
    observe_and_evict,
)
from msrnn.core.slots import HELD
from msrnn.policy import Bound


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
                j = observe_and_evict(
                    importance[b, g, :n],
                    observed[:n],
                    present[:n],
                    position[b, g, :n],
                    norm[b, g, :n] if norm.shape[0] else scratch[:0],
                    scratch[:n],
                    held,
                    t,
                    M,
                    size,
                    first,
                    recent,
                    decay,
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
        array_or_empty(sinks, 2),
        array_or_empty(norm, 3),
        evicted_at.numpy(),
        *bound_scalars(bound),
    )
    if bound.policy.decay == 0:
        importance.mul_(float(PER_UNIT))
    return evicted_at
