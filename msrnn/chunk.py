"""A chunk of tokens of one layer: scores over the slots and the new tokens, a scan for who leaves, outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.reference import HELD
from msrnn.scan import scan
from msrnn.scoring import Scoring
from msrnn.state import Slots
from msrnn.walk import walk


class Chunk(NamedTuple):
    output: Tensor  # [B, C, H, Dv]
    position: Tensor  # [B, G, S + C] int32 of the slots and the new tokens, -1 where there was no state
    evicted_at: Tensor  # [B, G, S + C] int32: the last step that saw the candidate, or HELD


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
    (B, H, C, D), K, (_, G, S) = query.shape, key.shape[1], slots.position.shape
    position = torch.cat([slots.position, query_position[:, None].expand(B, G, C)], dim=-1)
    importance = torch.zeros(position.shape, device=position.device)
    if slots.importance is not None:
        importance[..., :S] = slots.importance
    fresh = slots.encode(key, value)
    keys, values = (
        torch.cat([old, new.dense(slots.dtype)], dim=2) for old, new in zip(slots.dense(), fresh, strict=True)
    )
    if scoring.places is None:
        scores = scoring(query.reshape(B, K, -1, D), keys).view(B, G, H // G, C, S + C)
        sinks = scoring.sinks_of(G)
        evicted_at = scan(scores, position, importance, query_position, slots.bound, sinks, backend)
    else:
        grouped = query.reshape(B, K, -1, C, D)
        scores, evicted_at = walk(grouped, keys, position, importance, query_position, slots.bound, scoring, backend)
    output = torch.matmul(scores.view(B, K, -1, S + C).to(values.dtype), values)
    slots.keep(*fresh, position, importance, (position >= 0) & (evicted_at == HELD))
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
    if backend == "triton":
        from msrnn.kernels.chunk_triton import chunk_triton

        return Chunk(*chunk_triton(slots, query, key, value, query_position, scoring))
    return chunk_torch(slots, query, key, value, query_position, scoring, backend)
