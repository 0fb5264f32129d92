"""A decode step of one layer as two compiled calls, in float32; `TorchBackend.decode` is the reference."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy import float32 as f32
from torch import Tensor

from msrnn.backends.numba.jit import compile_loop
from msrnn.backends.numba.row_weights import weigh_token
from msrnn.backends.numba.rows import (
    LANES,
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
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots


@compile_loop(fastmath=LANES)
def dots(query: Array, keys: Array, scale: f32, into: Array) -> None:
    """Scores of four slots at a time, so that a query's row is loaded once for all four."""
    S = keys.shape[0]
    for j in range(0, S - 3, 4):
        for r in range(query.shape[0]):
            s0 = s1 = s2 = s3 = f32(0.0)
            for d in range(query.shape[1]):
                q = query[r, d]
                s0 += q * keys[j, d]
                s1 += q * keys[j + 1, d]
                s2 += q * keys[j + 2, d]
                s3 += q * keys[j + 3, d]
            into[r, j], into[r, j + 1] = s0 * scale, s1 * scale
            into[r, j + 2], into[r, j + 3] = s2 * scale, s3 * scale
    for j in range(S - S % 4, S):
        for r in range(query.shape[0]):
            s0 = f32(0.0)
            for d in range(query.shape[1]):
                s0 += query[r, d] * keys[j, d]
            into[r, j] = s0 * scale


@compile_loop(fastmath=LANES)
def _sum_values(attention: Array, values: Array, into: Array) -> None:
    """Values of four slots at a time, so that a sum is stored once for all four."""
    S = values.shape[0]
    into[:] = f32(0.0)
    for j in range(0, S - 3, 4):
        for r in range(attention.shape[0]):
            a0, a1, a2, a3 = attention[r, j], attention[r, j + 1], attention[r, j + 2], attention[r, j + 3]
            for d in range(values.shape[1]):
                v01 = a0 * values[j, d] + a1 * values[j + 1, d]
                into[r, d] += v01 + a2 * values[j + 2, d] + a3 * values[j + 3, d]
    for j in range(S - S % 4, S):
        for r in range(attention.shape[0]):
            for d in range(values.shape[1]):
                into[r, d] += attention[r, j] * values[j, d]


@compile_loop(fastmath=LANES)
def _length(rows: Array) -> f32:
    """The norm of some rows together."""
    total = f32(0.0)
    for k in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            total += rows[k, d] * rows[k, d]
    return f32(math.sqrt(total))


@compile_loop()
def _exact_sum(attention: Array, values: Array, present: Array, into: Array) -> None:
    """`_sum_values` over what is present only: 0 times a value that is NaN or infinite would be NaN."""
    for r in range(attention.shape[0]):
        for d in range(values.shape[1]):
            total = f32(0.0)
            for j in range(values.shape[0]):
                if present[j] > f32(0.0):
                    total += attention[r, j] * values[j, d]
            into[r, d] = total


@compile_loop()
def cap(scores: Array, softcap: f32) -> None:
    for m in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            scores[m, j] = softcap * f32(math.tanh(scores[m, j] / softcap))


@compile_loop()
def _free_slots(position: Array) -> Array:
    """The first empty slot of each group, [B, G]; searched before anything is written."""
    B, G, S = position.shape
    free = np.empty((B, G), np.int64)
    for b in range(B):
        for g in range(G):
            slot = 0
            while slot < S and position[b, g, slot] >= 0:
                slot += 1
            if slot == S:
                raise ValueError("this state has no free slot: read the text again, or load another state")
            free[b, g] = slot
    return free


@compile_loop()
def _attend(
    query: Array,
    key: Array,
    value: Array,
    keys: Array,
    values: Array,
    position: Array,
    ranges: Array,
    query_position: Array,
    sinks: Array,
    share: Array,
    output: Array,
    scale: f32,
    softcap: f32,
    bound: Scalars,
    observed: Array,
    present: Array,
    free: Array,
    slots: Array,
) -> None:
    """Write the new tokens into their slots, and attend.

    Fills for each group what `_evict` needs: the attention that the heads of this process have paid to each slot, which
    slots the token sees and which the policy may free, all [B, G, S], and in `slots` [B, G, 3] the slot of the token,
    the number of slots up to the last held one and how many of these the token sees.
    """
    window, spared, sliding = bound[3], bound[4], bound[6]
    B, K, R, _ = query.shape
    G, S = position.shape[1], position.shape[2]
    members = K // G  # KV heads of a group
    M = members * R
    empty = _free_slots(position)
    for b in range(B):
        t = query_position[b]
        if t < 0:
            output[b] = f32(0.0)
            continue
        for g in range(G):
            slot = empty[b, g]
            N = S  # slots up to the last held one: the tokens of a state that is not full are in its first slots
            while slot + 1 < N and position[b, g, N - 1] < 0:
                N -= 1
            scores = np.empty((M, N), f32)
            scratch, expired, sees, opens = np.empty(N, f32), np.empty(N, np.int32), present[b, g, :N], free[b, g, :N]
            where = position[b, g, :N]
            where[slot] = t
            hide_protected(where, ranges[b], opens)
            held = 0
            for j in range(N):
                sees[j] = f32(1.0) if where[j] >= 0 else f32(0.0)
                held += where[j] >= 0
            if window > 0:
                held -= expire(where if sliding else opens, sees, expired, spared, t - window, t)
            slots[b, g, 0], slots[b, g, 1], slots[b, g, 2] = slot, N, held
            for m in range(M):
                kv = g * members + m // R
                if m % R == 0:
                    keys[b, kv, slot] = key[b, kv]
                    values[b, kv, slot] = value[b, kv]
                    dots(query[b, kv], keys[b, kv, :N], scale, scores[m : m + R])
            if softcap > f32(0.0):
                cap(scores, softcap)
            for m in range(M):
                sink = sinks[b, g, m, 0] if sinks.shape[0] else f32(-np.inf)
                taken = attend_row(scores[m], highest(scores[m], sees, sink), sink, sees, scratch, observed[b, g, :N])
                if share.shape[0]:
                    share[b, g, m, 0] = taken
            for local in range(members):
                kv, rows = g * members + local, scores[local * R : (local + 1) * R]
                _sum_values(rows, values[b, kv, :N], output[b, kv])
                if not np.isfinite(output[b, kv].sum()):
                    _exact_sum(rows, values[b, kv, :N], sees, output[b, kv])


@compile_loop()
def _evict(
    value: Array,
    position: Array,
    importance: Array,
    row_weight: Array,
    given: Array,
    fewer: Array,
    query_position: Array,
    bound: Scalars,
    heads: int,
    observed: Array,
    present: Array,
    free: Array,
    slots: Array,
) -> None:
    """Update the importances after the new tokens, and free the slots that are evicted or expired."""
    B, G = position.shape[:2]
    members = value.shape[1] // G
    for b in range(B):
        t = query_position[b]
        if t < 0:
            continue
        own = lower_scalars(bound, fewer[b])
        for g in range(G):
            slot, N, held = slots[b, g, 0], slots[b, g, 1], slots[b, g, 2]
            where, sees, scratch = position[b, g, :N], present[b, g, :N], np.zeros(N, f32)
            if given.shape[0]:
                row_weight[b, g, slot] = given[b, g, 0]
            elif row_weight.shape[0]:
                row_weight[b, g, slot] = _length(value[b, g * members : (g + 1) * members])
            weights = row_weight[b, g, :N] if row_weight.shape[0] else scratch[:0]
            summed = importance[b, g, :N] if importance.shape[0] else np.zeros(N, f32)
            summed[slot] = f32(0.0)
            rest = where, free[b, g, :N], weights, scratch, N, held, t, heads, own
            observe_and_evict(summed, observed[b, g, :N], sees, *rest)
            for j in range(N):
                if sees[j] == f32(0.0):
                    where[j] = -1


def decode_numba(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    scoring: Scoring,
    share: Tensor | None = None,
) -> Tensor:
    """Where processes share a group of heads, the attention of all of them is summed before a slot is freed."""
    (B, K, R, _), (_, G, S), joint, policy = query.shape, slots.position.shape, slots.joint, slots.bound.policy
    shares = None if share is None else torch.zeros(B, G, K * R // G, 1, dtype=torch.float32)
    output = torch.empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    given = weigh_token(slots, key, value, query_position) if policy.weights or (policy.weighs and joint) else None
    value, query_position = value.contiguous(), query_position.contiguous()
    bound, position, at = bound_scalars(slots.bound), slots.position.numpy(), query_position.numpy()
    observed = torch.zeros(B, G, S, dtype=torch.float32)
    between = observed.numpy(), np.empty((B, G, S), f32), np.empty((B, G, S), np.int32), np.empty((B, G, 3), np.int64)
    _attend(
        query.contiguous().numpy(),
        key.contiguous().numpy(),
        value.numpy(),
        slots.keys.numpy(),
        slots.values.numpy(),
        position,
        ranges_array(slots.ranges, B),
        at,
        sinks_array(scoring.sinks_of(B, G, 1)),
        array_or_empty(shares, 4),
        output.numpy(),
        f32(scoring.scale),
        f32(scoring.softcap or 0.0),
        bound,
        *between,
    )
    if joint is not None:
        joint.sum(observed)
    _evict(
        value.numpy(),
        position,
        array_or_empty(slots.importance, 3),
        array_or_empty(slots.row_weight, 3),
        array_or_empty(given, 3),
        fewer_array(slots.fewer, B),
        at,
        bound,
        K * R // G * (1 if joint is None else joint.count),
        *between,
    )
    if share is not None and shares is not None:
        share.copy_(shares.view(share.shape))
    return output
