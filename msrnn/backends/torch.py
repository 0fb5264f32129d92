"""The definition over whole chunks, in plain torch: the reference for every kernel, on any device.

Scores over the slots and the new tokens are one matmul. The eviction scan then goes through the new tokens in order: it
is the only sequential part, and the one that other backends replace. One masked matmul gives the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from msrnn.backends.base import Prefilled
from msrnn.backends.decode_copies import DecodesCopies
from msrnn.bound import Bound
from msrnn.core.own_sizes import find_limits
from msrnn.core.protection import hide_protected
from msrnn.core.rope import Spacing
from msrnn.core.scores import Scoring
from msrnn.core.shards import own_part
from msrnn.core.slots import HELD, Slots

Maybe = Tensor | None
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Bound, Maybe, Maybe, Maybe, Maybe, Maybe], Tensor]  # as `scan_torch`
RepositionedScan = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Bound, Scoring, Maybe, Maybe, Maybe, Maybe], tuple[Tensor, Tensor]
]


def scan_torch(
    scores: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    sinks: Tensor | None = None,
    row_weight: Tensor | None = None,
    protected: Tensor | None = None,
    share: Tensor | None = None,
    fewer: Tensor | None = None,
    score: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """The eviction scan: attend, observe and evict for C tokens, in order. A rank that is NaN counts as infinity.

    scores          [B, G, M, C, N] float32, replaced by the attention of each row over the candidates it sees
    position        [B, G, N] int32, -1 where a column holds no state
    importance      [B, G, N] float32, updated in place
    query_position  [B, C] int32, -1 for padding, which attends to nothing and evicts nothing
    sinks           [B, G, M, C] float32: attention sinks: scores that take part in the softmax without a state
    row_weight      [B, G, N] float32, the weights of the candidates, where the policy ranks by them
    protected       [B, RANGES, 2] int32: ranges of positions that are not evicted
    share           [B, G, M, C] float32, zeros, contiguous: gets the part of the attention that the sinks take
    fewer           [B, 2] int32: by how much the size and `recent` of a sequence are lower than the bound's
    score           (i, seen [B, G, N]) -> scores of token i [B, G, M, N], where they depend on what is kept; else None
    returns         [B, G, N] int32: the last step (a token's position) that sees the candidate, or HELD
    """
    policy, (size, recent) = bound.policy, find_limits(bound, fewer)
    precise = torch.float32 if scores.device.type == "mps" else torch.float64  # exponentials of -100 and less
    present = position >= 0
    open_to_policy = hide_protected(position, protected)
    open_to_window = position if bound.sliding else open_to_policy
    evicted_at = torch.full_like(position, HELD)
    if policy.decay is None:
        importance.copy_(position)
    for i in range(scores.shape[3]):
        t = query_position[:, i, None, None]
        if bound.window is not None:
            expired = present & (open_to_window >= bound.spared) & (open_to_window <= t - bound.window)
            evicted_at = torch.where(expired, t - 1, evicted_at)
            present = present & ~expired
        seen = present & (position <= t)  # none for padding: no position is at most -1 and present

        row = scores[:, :, :, i] if score is None else score(i, seen)
        row = row.masked_fill(~seen[:, :, None], -torch.inf).to(precise)
        attention = row.softmax(-1)
        if sinks is not None:
            lead = sinks[..., i] - row.logsumexp(-1)  # not finite for padding
            attention = attention * (-lead).sigmoid()[..., None]
            if share is not None:
                share[..., i] = lead.sigmoid().masked_fill(t < 0, 0.0)
        attention = attention.masked_fill(~seen[:, :, None], 0.0)
        scores[:, :, :, i] = attention

        rank = importance
        if policy.decay is not None:
            observed = attention.mean(2)
            importance.copy_(torch.where(seen, policy.decay * importance + observed, importance))
            # With decay 0 the rank need not be stored, and keeps the range of `precise`.
            rank = importance if policy.decay else observed
        if row_weight is not None:
            rank = row_weight if policy.decay is None else rank * row_weight

        free = seen & (open_to_policy >= policy.first) & (open_to_policy <= t - recent)
        ranked = rank.masked_fill(~free | rank.isnan(), torch.inf)
        least = free & (ranked == ranked.amin(-1, keepdim=True))
        oldest = position.masked_fill(~least, HELD)
        evicted = least & (oldest == oldest.amin(-1, keepdim=True)) & (seen.sum(-1, keepdim=True) > size)
        evicted_at = torch.where(evicted, t, evicted_at)
        present = present & ~evicted
    return evicted_at


def scan_repositioned_torch(
    query: Tensor,
    keys: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    scoring: Scoring,
    row_weight: Tensor | None = None,
    protected: Tensor | None = None,
    share: Tensor | None = None,
    fewer: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The eviction scan with re-rotated keys: an eviction changes later positions, so tokens are scored one by one.

    query    [B, K, R, C, D], keys [B, K, N, D]: as the model rotated them; the queries' own tokens are among the keys
    returns  attention [B, G, M, C, N] float32, and what `scan_torch` returns
    """
    (B, K, R, C, _), (_, G, N), repositioning = query.shape, position.shape, scoring.repositioning
    assert repositioning is not None

    def score(i: int, seen: Tensor) -> Tensor:
        t = query_position[:, None, i, None].expand(B, G, 1)
        new_position = repositioning.spacing.reposition(position, seen)
        newest = new_position.gather(-1, (position == t).int().argmax(-1, keepdim=True))
        q = repositioning.rerotate(query[:, :, :, i], *(x.repeat_interleave(K // G, 1) for x in (t, newest)))
        k = repositioning.rerotate(keys, *(x.repeat_interleave(K // G, 1) for x in (position, new_position)))
        return scoring(q, k).view(B, G, -1, N)

    attention = torch.zeros(B, G, K * R // G, C, N, dtype=torch.float32, device=query.device)
    rest = bound, scoring.sinks_of(B, G, C), row_weight, protected, share, fewer, score
    return attention, scan_torch(attention, position, importance, query_position, *rest)


def weighted_values(
    attention: Tensor, values: Tensor, position: Tensor, evicted_at: Tensor, query_position: Tensor
) -> Tensor:
    """The outputs [B, K, R, C, Dv] of attention [B, G, M, C, N] over values [B, K, N, Dv].

    A value that is NaN or infinite changes only the tokens that see it, although 0 times it is NaN.
    """
    (B, _, _, C, N), K = attention.shape, values.shape[1]
    weights = attention.view(B, K, -1, N).to(values.dtype)
    output = torch.matmul(weights, values).view(B, K, -1, C, values.shape[-1])
    if not math.isfinite(output.sum(dtype=torch.float32).item()):  # the cheapest check of all numbers
        weights = weights.view(B, K, -1, C, N)
        broken = ~output.isfinite().all(-1).all(2).all(1)  # [B, C]
        for b, i in broken.nonzero().tolist():
            t = query_position[b, i]
            seen = (position[b] >= 0) & (position[b] <= t) & (evicted_at[b] >= t)  # [G, N]
            seen = seen.repeat_interleave(K // len(seen), 0)[:, None, :, None]
            moved = weights[b, :, :, i, :, None].float() * values[b, :, None].float()
            output[b, :, :, i] = moved.masked_fill(~seen, 0.0).sum(2).to(output.dtype)
    return output


class TorchBackend(DecodesCopies):
    """Plain torch; other backends override the scans, or whole methods where they have kernels for them."""

    name = "torch"
    default_chunk = 128
    decodes_repositioned = False
    scan: Scan = staticmethod(scan_torch)
    scan_repositioned: RepositionedScan = staticmethod(scan_repositioned_torch)

    def prefill(
        self,
        slots: Slots,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_position: Tensor,
        scoring: Scoring,
        share: Tensor | None = None,
    ) -> Prefilled:
        (B, H, C, D), K = query.shape, key.shape[1]
        slots = slots.in_use(C)
        new_keys, new_values = slots.quantize(key, value)
        fresh = slots.weigh(new_keys, new_values, query_position[:, None])
        position, importance, row_weight = slots.candidates(query_position, fresh)
        held_keys, held_values = slots.dequantized()
        keys = torch.cat([held_keys, new_keys.dequantized(slots.dtype)], dim=2)
        values = torch.cat([held_values, new_values.dequantized(slots.dtype)], dim=2)
        attention, evicted_at = self._attend_and_evict(
            slots, query.reshape(B, K, -1, C, D), keys, position, importance, query_position, scoring, row_weight, share
        )
        output = weighted_values(attention, values, position, evicted_at, query_position)
        slots.keep(new_keys, new_values, position, importance, row_weight, (position >= 0) & (evicted_at == HELD))
        return Prefilled(output.view(B, H, C, -1).transpose(1, 2), position, evicted_at)

    def decode(
        self,
        slots: Slots,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_position: Tensor,
        scoring: Scoring,
        share: Tensor | None = None,
    ) -> Tensor:
        slots = slots.in_use(1)
        (B, K, R, _), position, importance = query.shape, slots.position, slots.importance
        G = position.shape[1]
        slot = position.argmin(-1, keepdim=True)  # the first empty one: -1 is below every position
        position.scatter_(-1, slot, query_position[:, None, None].expand(B, G, 1))
        if importance is None:
            importance = torch.zeros(position.shape, dtype=torch.float32, device=position.device)
        importance.scatter_(-1, slot, 0.0)
        new_keys, new_values = slots.quantize(key[:, :, None], value[:, :, None])
        row_weight = slots.weigh(new_keys, new_values, query_position[:, None, None])
        slots.write(slot, new_keys, new_values, row_weight)
        keys, values = slots.dequantized()
        share = None if share is None else share.view(B, K * R, 1)
        attention, evicted_at = self._attend_and_evict(
            *(slots, query[:, :, :, None], keys, position, importance, query_position[:, None], scoring),
            *(slots.row_weight, share),
        )
        output = weighted_values(attention, values, position, evicted_at, query_position[:, None])
        position.masked_fill_(evicted_at != HELD, -1)
        return output.view(B, K, R, -1)

    def check_gaps(self, spacing: Spacing, bound: Bound, columns: int) -> None:
        """Gaps of any size can be computed."""

    def _attend_and_evict(
        self,
        slots: Slots,
        query: Tensor,
        keys: Tensor,
        position: Tensor,
        importance: Tensor,
        query_position: Tensor,
        scoring: Scoring,
        row_weight: Tensor | None,
        share: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """query [B, K, R, C, D], keys [B, K, N, D] -> attention [B, G, M, C, N] float32, eviction times [B, G, N].

        Where other processes have heads of the group, the scan goes through the scores of all heads, in every process:
        an eviction changes the attention of all later tokens, so a mean over the heads of a chunk cannot be known
        before the scan.
        """
        joint, bound, (B, G, _), C = slots.joint, slots.bound, position.shape, query.shape[3]
        if joint is not None and scoring.sinks is not None:
            scoring = replace(scoring, sinks=joint.gather(scoring.sinks, scoring.sinks.dim() // 2))  # over the heads
        heads = query.shape[1] * query.shape[2] * (1 if joint is None else joint.count)
        shares = None if share is None else torch.zeros(B, G, heads // G, C, dtype=torch.float32, device=query.device)
        rest, own = (position, importance, query_position, bound), (row_weight, slots.ranges, shares, slots.fewer)
        if scoring.repositioning is not None:
            if joint is not None:
                query, keys = joint.gather(query, 1), joint.gather(keys, 1)
            attention, evicted_at = self.scan_repositioned(query, keys, *rest, scoring, *own)
        else:
            attention = scoring(query.flatten(2, 3), keys).view(B, G, -1, C, keys.shape[2])
            if joint is not None:
                attention = joint.gather(attention, 2)
            evicted_at = self.scan(attention, *rest, scoring.sinks_of(B, G, C), *own)
        if share is not None and shares is not None:
            share.copy_(own_part(shares, 2, joint).flatten(1, 2))
        return own_part(attention, 2, joint).contiguous(), evicted_at
