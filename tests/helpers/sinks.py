"""A layer whose attention sinks differ from query to query: its definition, and what a backend makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.backends.base import Backend
from msrnn.bound import Bound
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots


class Attended(NamedTuple):
    output: Tensor  # [B, T, H, Dv]
    share: Tensor  # [B, H, T] of the sinks


def read_with_sinks(
    backend: Backend, slots: Slots, tokens: Sequence[Tensor], real: Tensor, scoring: Scoring, pieces: Sequence[int]
) -> Attended:
    """Read query [B, H, T, D], key and value [B, K, T, D] in pieces: a single token is a decode step.

    Sinks [B, H, T] and the share are cut into pieces that are not contiguous, and the share is NaN before.
    """
    (B, H, T, _), K = tokens[0].shape, tokens[1].shape[1]
    share = torch.full((B, H, T), torch.nan, dtype=torch.float32, device=real.device)
    outputs, start = [], 0
    for length in pieces:
        piece = slice(start, start + length)
        query, key, value = (x[:, :, piece] for x in tokens)
        position = slots.advance(length, real[:, piece])
        given = scoring
        if scoring.sinks is not None and scoring.sinks.dim() == 3:
            given = replace(scoring, sinks=scoring.sinks[:, :, piece])
        if length == 1:
            one = query[:, :, 0].reshape(B, K, H // K, -1), key[:, :, 0], value[:, :, 0], position[:, 0], given
            output = backend.decode(slots, *one, share[:, :, start].view(B, K, -1)).view(B, 1, H, -1)
        else:
            output = backend.prefill(slots, query, key, value, position, given, share[:, :, piece]).output
        outputs.append(output)
        start += length
    assert start == T
    return Attended(torch.cat(outputs, dim=1), share)


def define(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bound: Bound, scoring: Scoring
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """One sequence, in float64: output [T, H, Dv], share [H, T], and the positions that each group holds at the end.

    query [H, T, D], key and value [K, T, D], sinks [H, T]. The sink is one more score, whose value is zero.
    """
    (H, T, _), K, G = query.shape, key.shape[0], bound.groups(key.shape[0])
    query, value = query.double(), value.double()
    key, rows = key.double().repeat_interleave(H // K, 0), value.repeat_interleave(H // K, 0)
    norm = value.square().sum(-1).view(G, -1, T).sum(1).sqrt()
    output, share = torch.zeros(T, H, value.shape[-1], dtype=torch.float64), torch.zeros(H, T, dtype=torch.float64)
    held: list[list[int]] = [[] for _ in range(G)]
    importance = torch.zeros(G, T, dtype=torch.float64)
    policy, decay = bound.policy, bound.policy.decay
    for t in range(T):
        for g in range(G):
            heads = slice(g * H // G, (g + 1) * H // G)
            if bound.window is not None:
                held[g] = [j for j in held[g] if j < bound.spared or j > t - bound.window]
            held[g].append(t)
            scores = torch.einsum("hd,hnd->hn", query[heads, t], key[heads][:, held[g]]) * scoring.scale
            if scoring.softcap is not None:
                scores = scoring.softcap * (scores / scoring.softcap).tanh()
            attention = torch.cat([scores, sinks[heads, t, None].double()], dim=-1).softmax(-1)
            share[heads, t] = attention[:, -1]
            output[t, heads] = torch.einsum("hn,hnd->hd", attention[:, :-1], rows[heads][:, held[g]])
            seen = attention[:, :-1].mean(0)
            importance[g, held[g]] = (decay or 0.0) * importance[g, held[g]] + seen
            if len(held[g]) > bound.size:
                rank = importance[g] * (norm[g] if policy.value_norm else 1.0)
                free = [j for j in held[g] if policy.first <= j <= t - bound.recent]
                held[g].remove(min(free, key=lambda j: j if decay is None else float(rank[j])))
    return output, share, held
