"""The definition, token by token, in plain torch: every faster implementation is tested against it.

One layer and one sequence, without padding or slots, and not optimized, so that it can be compared with the paper.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.core.rope import Repositioning
from msrnn.core.slots import HELD
from msrnn.policy import Bound


class Recurrence(NamedTuple):
    output: Tensor  # [H, T, Dv]
    evicted_at: Tensor  # [G, T]: the last step that saw the token, or HELD
    margin: Tensor  # [G, T]: relative difference of the two lowest ranks at each step; inf where nothing was evicted


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bound: Bound | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    repositioning: Repositioning | None = None,
    protected: Collection[int] = (),
) -> Recurrence:
    """query [H, T, D], key [K, T, D], value [K, T, Dv], sinks [H]; bound None: nothing is evicted.

    Without `repositioning`, keys stay as the model rotated them. `protected` are positions of tokens that are never
    evicted, as the `first` tokens are not.
    """
    groups = bound.groups(key.shape[0]) if bound else 1
    parts = [
        _one_group(q, k, v, bound, scale, softcap, s, repositioning, protected if bound and bound.protects else ())
        for q, k, v, s in zip(
            query.chunk(groups),
            key.chunk(groups),
            value.chunk(groups),
            sinks.chunk(groups) if sinks is not None else [None] * groups,
            strict=True,
        )
    ]
    return Recurrence(
        torch.cat([p.output for p in parts]),
        torch.cat([p.evicted_at for p in parts]),
        torch.cat([p.margin for p in parts]),
    )


def _one_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bound: Bound | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    repositioning: Repositioning | None,
    protected: Collection[int],
) -> Recurrence:
    """The heads of one group, which evict the same token."""
    share = query.shape[0] // key.shape[0]  # query heads that share a KV head
    norm = value.float().square().sum((0, 2)).sqrt().tolist()  # of each token's values in all heads
    key, value = key.repeat_interleave(share, 0), value.repeat_interleave(share, 0)
    length = query.shape[1]
    held: list[int] = []
    importance: dict[int, float] = {}
    evicted_at = torch.full((1, length), HELD)
    margin = torch.full((1, length), math.inf)
    outputs = []
    for t in range(length):
        # append
        if bound and bound.window is not None:
            spared = () if bound.sliding else protected
            for j in [j for j in held if bound.spared <= j <= t - bound.window and j not in spared]:
                held.remove(j)
                evicted_at[0, j] = t - 1
        held.append(t)

        # attend
        newest, kept = query[:, t, None], key[:, held]
        if repositioning is not None:
            position = torch.tensor(held)
            new_position = repositioning.spacing.reposition_sorted(position)
            newest = repositioning.rerotate(newest, position[-1:], new_position[-1:])
            kept = repositioning.rerotate(kept, position, new_position)
        scores = (newest * kept).sum(-1).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].float()], dim=-1)
        attention = scores.double().softmax(-1)[:, : len(held)]  # ranks may be far below the least float32 number
        outputs.append((attention[..., None].to(value.dtype) * value[:, held]).sum(1))
        if bound is None:
            continue

        # observe
        decay = bound.policy.decay
        for j, w in zip(held, attention.mean(0).tolist(), strict=True):
            before = decay * importance.get(j, 0.0) if decay else 0.0  # 0 times NaN or infinity is not 0
            importance[j] = j if decay is None else before + w

        # evict
        if len(held) > bound.size:
            free = [j for j in held if bound.policy.first <= j <= t - bound.recent and j not in protected]
            rank = {j: _rank(importance[j] * (norm[j] if bound.policy.value_norm else 1.0)) for j in free}
            ranked = sorted(free, key=lambda j: (rank[j], j))
            if len(ranked) > 1:
                margin[0, t] = _margin(rank[ranked[0]], rank[ranked[1]])
            held.remove(ranked[0])
            evicted_at[0, ranked[0]] = t
    return Recurrence(torch.stack(outputs, dim=1), evicted_at, margin)


def _rank(importance: float) -> float:
    """NaN is evicted last."""
    return math.inf if math.isnan(importance) else importance


def _margin(least: float, next_least: float) -> float:
    """The relative difference of two ranks: 0 for a tie, even of infinities."""
    if least == next_least:
        return 0.0
    return math.inf if math.isinf(next_least) else (next_least - least) / abs(next_least)
