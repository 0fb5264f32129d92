"""The decode step: one token goes into a free slot, attends over the slots where they lie, and one of them is freed."""

from __future__ import annotations

import torch
from torch import Tensor

from msrnn.kernels.decode_cpu import decode_cpu
from msrnn.reference import HELD
from msrnn.scoring import Scoring
from msrnn.slots import Slots
from msrnn.walk import attended, walk


def decode_torch(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    scoring: Scoring,
    backend: str = "torch",
) -> Tensor:
    """Append, attend, observe, evict; the buffers of the slots are updated in place.

    query           [B, K, R, D]: R query heads share a KV head
    key, value      [B, K, D], [B, K, Dv] of the new token
    query_position  [B] int32, -1 for padding
    returns         [B, K, R, Dv]
    """
    slots = slots.in_use(1)
    (B, K, R, _), position, importance = query.shape, slots.position, slots.importance
    G = position.shape[1]
    slot = position.argmin(-1, keepdim=True)  # the first empty one: -1 is below every position
    position.scatter_(-1, slot, query_position[:, None, None].expand(B, G, 1))
    if importance is None:
        importance = torch.zeros(position.shape, dtype=torch.float32, device=position.device)
    importance.scatter_(-1, slot, 0.0)
    fresh = slots.encode(key[:, :, None], value[:, :, None])
    slots.write(slot, *fresh, slots.norms(fresh[1]))
    keys, values = slots.dense()
    attention, evicted_at = walk(
        query[:, :, :, None],
        keys,
        position,
        importance,
        query_position[:, None],
        slots.bound,
        scoring,
        slots.norm,
        backend,
    )
    output = attended(attention, values, position, evicted_at, query_position[:, None])
    position.masked_fill_(evicted_at != HELD, -1)
    return output.view(B, K, R, -1)


def decode(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    scoring: Scoring,
    backend: str,
) -> Tensor:
    """`decode_torch`, by the backend's own kernel where it has one for such states and positions."""
    if backend == "triton":
        from msrnn.kernels.decode_triton import decode_triton

        return decode_triton(slots, query, key, value, query_position, scoring)
    if backend == "compiled" and slots.keys.dtype == torch.float32 and scoring.places is None:
        return decode_cpu(slots, query, key, value, query_position, scoring)
    return decode_torch(slots, query, key, value, query_position, scoring, backend)
