"""The eviction scan: a chunk's scores in, attention and eviction times out. The one sequential part of reading.

Shapes, here and in every kernel: B rows of a batch, G groups that forget together, M query heads of a group,
C new tokens, N candidates (slots, then new tokens).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from msrnn.kernels.scan_cpu import scan_cpu
from msrnn.policy import Bound
from msrnn.reference import HELD


def scan_torch(
    scores: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    sinks: Tensor | None = None,
    norm: Tensor | None = None,
    score: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """Walk the C rows in order: attend, observe, evict. A rank that is not a number counts as infinity.

    scores          [B, G, M, C, N] float32, replaced by the attention of each row over the candidates it sees
    position        [B, G, N] int32, -1 where a column holds no state
    importance      [B, G, N] float32, updated in place
    query_position  [B, C] int32, -1 for padding, which attends to nothing and makes nothing leave
    sinks           [G, M] float32: a score that takes part in the softmax and is no state
    norm            [B, G, N] float32 of the candidates' values, where the policy ranks by it
    score           (i, seen [B, G, N]) -> row i [B, G, M, N], where that depends on who is seen; else `scores` has it
    returns         [B, G, N] int32: the last step (a token's position) that sees the candidate, or HELD
    """
    policy = bound.policy
    precise = torch.float32 if scores.device.type == "mps" else torch.float64  # exponentials of -100 and less
    present = position >= 0
    evicted_at = torch.full_like(position, HELD)
    if policy.decay is None:
        importance.copy_(position)
    for i in range(scores.shape[3]):
        t = query_position[:, i, None, None]
        if bound.window is not None:
            expired = present & (position >= bound.spared) & (position <= t - bound.window)
            evicted_at = torch.where(expired, t - 1, evicted_at)
            present = present & ~expired
        seen = present & (position <= t)  # none for padding: no position is at most -1 and present

        row = scores[:, :, :, i] if score is None else score(i, seen)
        row = row.masked_fill(~seen[:, :, None], -torch.inf)
        if sinks is not None:
            row = torch.cat([row, sinks[None, :, :, None].expand(*row.shape[:3], 1)], dim=-1)
        attention = row.to(precise).softmax(-1)[..., : position.shape[-1]].masked_fill(~seen[:, :, None], 0.0)
        scores[:, :, :, i] = attention

        rank = importance
        if policy.decay is not None:
            observed = attention.mean(2)
            importance.copy_(torch.where(seen, policy.decay * importance + observed, importance))
            rank = importance if policy.decay else observed  # only what is stored need fit float32
        rank = rank if norm is None else rank * norm

        free = seen & (position >= policy.first) & (position <= t - bound.recent)
        ranked = rank.masked_fill(~free | rank.isnan(), torch.inf)
        least = free & (ranked == ranked.amin(-1, keepdim=True))
        oldest = position.masked_fill(~least, HELD)
        leaves = least & (oldest == oldest.amin(-1, keepdim=True)) & (seen.sum(-1, keepdim=True) > bound.size)
        evicted_at = torch.where(leaves, t, evicted_at)
        present = present & ~leaves
    return evicted_at


def scan(
    scores: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    sinks: Tensor | None,
    norm: Tensor | None,
    backend: str,
) -> Tensor:
    """`scan_torch`, by the compiled loop where the backend is that."""
    walk = scan_cpu if backend == "compiled" else scan_torch
    return walk(scores, position, importance, query_position, bound, sinks, norm)
