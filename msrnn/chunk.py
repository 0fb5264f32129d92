"""A chunk of tokens of one layer: scores over the slots and the new tokens, a scan for who leaves, outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.reference import HELD
from msrnn.scoring import Scoring
from msrnn.slots import Slots
from msrnn.walk import attended, walk


class Chunk(NamedTuple):
    output: Tensor  # [B, C, H, Dv]
    position: Tensor  # [B, G, N] int32 of the slots (those in use, or all) and the new tokens, -1 where no state is
    evicted_at: Tensor  # [B, G, N] int32: the last step that saw the candidate, or HELD


def chunk_torch(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    scoring: Scoring,
    backend: str = "torch",
) -> Chunk:
    """Append, attend, observe, evict for C tokens, in order; the buffers of the slots are updated in place.

    query           [B, H, C, D]
    key, value      [B, K, C, D], [B, K, C, Dv]
    query_position  [B, C] int32, -1 for padding
    """
    (B, H, C, D), K = query.shape, key.shape[1]
    slots = slots.in_use(C)
    fresh = slots.encode(key, value)
    position, importance, norm = slots.candidates(query_position, fresh[1])
    keys, values = (
        torch.cat([old, new.dense(slots.dtype)], dim=2) for old, new in zip(slots.dense(), fresh, strict=True)
    )
    attention, evicted_at = walk(
        query.reshape(B, K, -1, C, D),
        keys,
        position,
        importance,
        query_position,
        slots.bound,
        scoring,
        norm,
        backend,
    )
    output = attended(attention, values, position, evicted_at, query_position)
    slots.keep(*fresh, position, importance, norm, (position >= 0) & (evicted_at == HELD))
    return Chunk(output.view(B, H, C, -1).transpose(1, 2), position, evicted_at)


def chunk(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    scoring: Scoring,
    backend: str,
) -> Chunk:
    """`chunk_torch`, by the backend's own kernels where it has them."""
    if backend == "triton" and scoring.places is None:
        from msrnn.kernels.chunk_triton import chunk_triton

        return Chunk(*chunk_triton(slots, query, key, value, query_position, scoring))
    return chunk_torch(slots, query, key, value, query_position, scoring, backend)
