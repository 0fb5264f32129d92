"""One token of one layer as a single compiled call: append, attend, observe, evict, in the slots themselves."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from numpy import float32 as f32
from numpy import int32 as i32
from torch import Tensor

from msrnn.kernels.scan_cpu import LANES, Array, attend_row, decay_code, expire, least_important, observe
from msrnn.policy import Bound


@njit(fastmath=LANES, cache=True, nogil=True)
def _dots(query: Array, keys: Array, scale: f32, into: Array) -> None:
    for j in range(keys.shape[0]):
        for r in range(query.shape[0]):
            total = f32(0.0)
            for d in range(query.shape[1]):
                total += query[r, d] * keys[j, d]
            into[r, j] = total * scale


@njit(fastmath=LANES, cache=True, nogil=True)
def _weighted_sum(attention: Array, values: Array, present: Array, into: Array) -> None:
    into[:] = f32(0.0)
    for j in range(values.shape[0]):
        if present[j] > f32(0.0):
            for r in range(attention.shape[0]):
                a = attention[r, j]
                for d in range(values.shape[1]):
                    into[r, d] += a * values[j, d]


@njit(cache=True, nogil=True)
def _cap(scores: Array, softcap: f32) -> None:
    for m in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            scores[m, j] = softcap * f32(math.tanh(scores[m, j] / softcap))


@njit(cache=True, nogil=True)
def _decode(
    query: Array,
    key: Array,
    value: Array,
    keys: Array,
    values: Array,
    position: Array,
    importance: Array,
    query_position: Array,
    sinks: Array,
    output: Array,
    scale: f32,
    softcap: f32,
    size: int,
    first: i32,
    recent: i32,
    window: i32,
    decay: f32,
) -> None:
    B, K, R, _ = query.shape
    G, S = position.shape[1], position.shape[2]
    members = K // G  # KV heads of a group
    M = members * R
    scores = np.empty((M, S), f32)
    scratch, observed, present = np.empty(S, f32), np.empty(S, f32), np.empty(S, f32)
    fresh, expired = np.zeros(S, f32), np.empty(S, np.int32)
    for b in range(B):
        t = query_position[b]
        if t < 0:
            output[b] = f32(0.0)
            continue
        for g in range(G):
            where = position[b, g]
            slot = 0
            while where[slot] >= 0:
                slot += 1
            where[slot] = t
            held = 0
            for j in range(S):
                present[j] = f32(1.0) if where[j] >= 0 else f32(0.0)
                held += where[j] >= 0
            if window > 0:
                held -= expire(where, present, expired, t, window)
            weight = importance[b, g] if importance.shape[0] else fresh
            weight[slot] = f32(0.0)
            observed[:] = f32(0.0)
            for m in range(M):
                kv = g * members + m // R
                if m % R == 0:
                    keys[b, kv, slot] = key[b, kv]
                    values[b, kv, slot] = value[b, kv]
                    _dots(query[b, kv], keys[b, kv], scale, scores[m : m + R])
            if softcap > f32(0.0):
                _cap(scores, softcap)
            for m in range(M):
                sink = sinks[g, m] if sinks.shape[0] else f32(-np.inf)
                attend_row(scores[m], max(scores[m].max(), sink), sink, present, scratch, observed)
            for local in range(members):
                kv = g * members + local
                _weighted_sum(scores[local * R : (local + 1) * R], values[b, kv], present, output[b, kv])
            observe(weight, observed, present, where, decay, M)
            if held > size:
                j = least_important(weight, present, where, first, t - recent)
                present[j] = f32(0.0)
            for j in range(S):
                if present[j] == f32(0.0):
                    where[j] = -1


def decode_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    importance: Tensor | None,
    query_position: Tensor,
    bound: Bound,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [B, K, R, D], key [B, K, D], value [B, K, Dv]; the buffers of the slots are updated in place.

    query_position [B] int32, -1 for padding; sinks [G, M]. Returns [B, K, R, Dv]. All floats are float32.
    """
    output = torch.empty(*query.shape[:3], value.shape[-1])
    _decode(
        query.contiguous().numpy(),
        key.contiguous().numpy(),
        value.contiguous().numpy(),
        keys.numpy(),
        values.numpy(),
        position.numpy(),
        importance.numpy() if importance is not None else np.empty((0, 0, 0), f32),
        query_position.contiguous().numpy(),
        sinks.numpy() if sinks is not None else np.empty((0, 0), f32),
        output.numpy(),
        f32(scale),
        f32(softcap or 0.0),
        bound.size,
        i32(bound.policy.first),
        i32(bound.recent),
        i32(bound.window or 0),
        decay_code(bound),
    )
    return output
