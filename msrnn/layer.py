"""Attention of one layer: a block of tokens goes through a backend in chunks. Also attention without a bounded state.

This module knows slots and backends, but no models: queries and keys arrive with RoPE applied. Outputs are
[B, T, H, Dv].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from msrnn.backends.base import Backend
from msrnn.core.scores import Scoring
from msrnn.core.shards import CHECKS, check_same
from msrnn.core.slots import Growing, Slots

Record = Callable[[Tensor, Tensor], None]  # (position, evicted_at), both [B, G, N]


def attend(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    scoring: Scoring,
    chunk: int,
    backend: Backend,
    record: Record | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """Append, attend, observe and evict for T tokens of a layer, at most `chunk` at a time.

    query [B, H, T, D], key and value [B, K, T, D]; position [B, T] from `slots.advance`, -1 where padding. share
    [B, H, T] gets the part of each query's attention that its sinks took.
    """
    if CHECKS and slots.joint is not None:
        check_same(slots.position, slots.joint, "the processes that share this layer have evicted other tokens")
    T = query.shape[2]
    if T == 1 and record is None:
        return _attend_one(slots, query, key, value, position, scoring, backend, share)
    decodes = record is None and backend.decodes_repositioned and scoring.repositioning is not None
    width = 1 if decodes else -(-T // -(-T // chunk))  # of chunks that are as equal as possible
    sinks = scoring.sinks if scoring.sinks is not None and scoring.sinks.ndim == 3 else None  # of each query
    outputs = []
    for q, k, v, t, s, part in zip(
        *(x.split(width, 2) for x in (query, key, value)),
        position.split(width, 1),
        repeat(None) if sinks is None else sinks.split(width, 2),
        repeat(None) if share is None else share.split(width, 2),
        strict=False,
    ):
        scores = scoring if s is None else replace(scoring, sinks=s)
        if decodes:
            outputs.append(_attend_one(slots, q, k, v, t, scores, backend, part))
            continue
        output, candidates, evicted_at = backend.prefill(slots, q, k, v, t, scores, part)
        outputs.append(output)
        if record is not None:
            record(candidates, evicted_at)
    # A copy of one tensor would be a node of a CUDA graph that runs in no order but that of the capture.
    return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


def _attend_one(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    scoring: Scoring,
    backend: Backend,
    share: Tensor | None,
) -> Tensor:
    """One decode step: query [B, H, 1, D], key and value [B, K, 1, D], position [B, 1] -> [B, 1, H, Dv]"""
    (B, H, _, D), K = query.shape, key.shape[1]
    rows = query.reshape(B, K, H // K, D), key[:, :, 0], value[:, :, 0], position[:, 0].contiguous()
    taken = None if share is None else share[..., 0].unflatten(1, (K, -1))
    return backend.decode(slots, *rows, scoring, taken).view(B, 1, H, -1)


def attend_unbounded(
    growing: Growing, start: int, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scoring: Scoring
) -> Tensor:
    """Append and attend for T tokens of a layer that evicts nothing; shapes as for `attend`.

    `start` is the number of columns that were read before, padding included.
    """
    growing.padded |= real is not None
    position = growing.advance(query.shape[2], real)
    growing.append(start, key, value, position)
    n, T = start + query.shape[2], query.shape[2]
    keys, values = growing.keys[:, :, :n], growing.values[:, :, :n]
    mask = None
    if growing.padded or 1 < T < n:
        held = growing.position[:, :, None, :n]
        mask = (held >= 0) & (held <= position[:, None, :, None])
    return plain_attention(query, keys, values, mask, scoring)[0]


def plain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    dropout: float = 0.0,
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention over given keys: output [B, T, H, Dv] and, if `weights` is True, weights [B, H, T, N].

    mask [B, 1, T, N] is True where a query sees a key, or a float mask that is added to the scores; None is causal.
    SDPA is used where possible: it supports neither soft caps nor attention sinks.
    """
    (B, H, T, D), K = query.shape, keys.shape[1]
    if scoring.softcap is None and scoring.sinks is None and not weights:
        output = scaled_dot_product_attention(
            query, keys, values, mask, dropout, is_causal=mask is None and T > 1, scale=scoring.scale, enable_gqa=H != K
        )
        return output.transpose(1, 2), None
    if mask is None:
        mask = torch.ones(1, 1, T, keys.shape[2], dtype=torch.bool, device=query.device).tril(keys.shape[2] - T)
    scores = scoring(query.reshape(B, K, -1, D), keys).view(B, H, T, -1)
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.float().view(1, H, 1, 1).expand(B, H, T, 1)], dim=-1)
    attention = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    kept = torch.nn.functional.dropout(attention, dropout) if dropout else attention
    output = torch.matmul(kept.view(B, K, -1, keys.shape[2]), values).view(B, H, T, -1).transpose(1, 2)
    return output, attention if weights else None
