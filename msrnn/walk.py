"""The walk over a chunk's rows, from queries and keys: attention and eviction times.

Where tokens stand as the model rotated them, all scores are one matmul, and the scan does the rest. Elsewhere, who
leaves changes where everyone behind it stands: a row's scores are known only when the row before it is done, and the
walk scores each row itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from msrnn.kernels.walk_cpu import walk_cpu
from msrnn.policy import Bound
from msrnn.scan import scan, scan_torch
from msrnn.scoring import Scoring


def walk_torch(
    query: Tensor,
    keys: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    scoring: Scoring,
    norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `scan_torch` makes of scores, from what scores are made of.

    query    [B, K, R, C, D], keys [B, K, N, D]: as the model rotated them, the queries' own tokens among the keys
    returns  attention [B, G, M, C, N] float32, and what `scan_torch` returns
    """
    (B, K, R, C, _), (_, G, N), places = query.shape, position.shape, scoring.places
    assert places is not None

    def score(i: int, seen: Tensor) -> Tensor:
        t = query_position[:, None, i, None].expand(B, G, 1)
        place = places.spacing.places(position, seen)
        newest = place.gather(-1, (position == t).int().argmax(-1, keepdim=True))
        q = places.moved(query[:, :, :, i], *(x.repeat_interleave(K // G, 1) for x in (t, newest)))
        k = places.moved(keys, *(x.repeat_interleave(K // G, 1) for x in (position, place)))
        return scoring(q, k).view(B, G, -1, N)

    attention = torch.zeros(B, G, K * R // G, C, N, dtype=torch.float32, device=query.device)
    sinks = scoring.sinks_of(G)
    return attention, scan_torch(attention, position, importance, query_position, bound, sinks, norm, score)


def walk(
    query: Tensor,
    keys: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    scoring: Scoring,
    norm: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`walk_torch`, by the compiled loop where the backend is that, and by the scan where nobody moves."""
    if scoring.places is not None:
        steps = walk_cpu if backend == "compiled" else walk_torch
        return steps(query, keys, position, importance, query_position, bound, scoring, norm)
    G, C = position.shape[1], query.shape[3]
    scores = scoring(query.flatten(2, 3), keys).view(query.shape[0], G, -1, C, keys.shape[2])
    sinks = scoring.sinks_of(G)
    return scores, scan(scores, position, importance, query_position, bound, sinks, norm, backend)


def attended(attention: Tensor, values: Tensor, position: Tensor, evicted_at: Tensor, query_position: Tensor) -> Tensor:
    """The outputs [B, K, R, C, Dv] of attention [B, G, M, C, N] over values [B, K, N, Dv].

    A value that is NaN or infinite reaches the tokens that see it, and no others, though 0 times it is NaN.
    """
    (B, _, _, C, N), K = attention.shape, values.shape[1]
    weights = attention.view(B, K, -1, N).to(values.dtype)
    output = torch.matmul(weights, values).view(B, K, -1, C, values.shape[-1])
    if not math.isfinite(output.sum(dtype=torch.float32).item()):  # the cheapest way to look at all of it
        weights = weights.view(B, K, -1, C, N)
        broken = ~output.isfinite().all(-1).all(2).all(1)  # [B, C]
        for b, i in broken.nonzero().tolist():
            t = query_position[b, i]
            seen = (position[b] >= 0) & (position[b] <= t) & (evicted_at[b] >= t)  # [G, N]
            seen = seen.repeat_interleave(K // len(seen), 0)[:, None, :, None]
            moved = weights[b, :, :, i, :, None].float() * values[b, :, None].float()
            output[b, :, :, i] = moved.masked_fill(~seen, 0.0).sum(2).to(output.dtype)
    return output
