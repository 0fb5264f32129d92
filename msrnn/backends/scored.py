"""The definition for a policy with a Python function: token by token, one group of heads at a time, in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.backends.base import Prefilled
from msrnn.backends.decode_copies import DecodesCopies
from msrnn.bound import Bound
from msrnn.core.protection import hide_protected
from msrnn.core.rope import Spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import HELD, Slots
from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.scored import Candidates, ScoredPolicy

_Eviction = tuple[int, int, int, int]  # sequence, group, position, and the last step that saw the token


class ScoredBackend(DecodesCopies):
    """Attention and eviction under a `ScoredPolicy`. A chunk is read token by token, so that no split can matter."""

    name = "torch"
    default_chunk = 128
    decodes_repositioned = False

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
        (B, H, C, D), K, G = query.shape, key.shape[1], slots.position.shape[1]
        position = torch.cat([slots.position, query_position[:, None].expand(B, G, C)], dim=-1)
        evicted_at = torch.full_like(position, HELD)
        outputs = []
        sinks = scoring.sinks_of(B, 1, C)
        for i in range(C):
            newest, own = query[:, :, i].view(B, K, H // K, D), None if share is None else share[:, :, i].view(B, K, -1)
            scoring = replace(scoring, sinks=None if sinks is None else sinks[:, 0, :, i, None])
            output, evictions = _step(slots, newest, key[:, :, i], value[:, :, i], query_position[:, i], scoring, own)
            outputs.append(output.view(B, H, -1))
            for b, g, evicted, time in evictions:
                evicted_at[b, g].masked_fill_(position[b, g] == evicted, time)
        return Prefilled(torch.stack(outputs, dim=1), position, evicted_at)

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
        return _step(slots, query, key, value, query_position, scoring, share)[0]

    def check_gaps(self, spacing: Spacing, bound: Bound, columns: int) -> None:
        """Gaps of any size can be computed."""


def _step(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    scoring: Scoring,
    share: Tensor | None,
) -> tuple[Tensor, list[_Eviction]]:
    """One token of each sequence; shapes are those of `Backend.decode`."""
    slots = slots.in_use(1)
    (B, K, R, _), G, importance = query.shape, slots.position.shape[1], slots.importance
    sinks = scoring.sinks_of(B, K, 1)
    assert importance is not None
    if share is not None:
        share.zero_()
    slot = slots.position.argmin(-1, keepdim=True)  # the first empty one: -1 is below every position
    slots.position.scatter_(-1, slot, query_position[:, None, None].expand(B, G, 1))
    importance.scatter_(-1, slot, 0.0)
    slots.write(slot, *slots.quantize(key[:, :, None], value[:, :, None]), None)
    keys, values = slots.dequantized()
    output = values.new_zeros(B, K, R, values.shape[-1])
    evictions: list[_Eviction] = []
    for b, t in enumerate(query_position.tolist()):
        bound = slots.bound_of(b)
        for g in range(G if t >= 0 else 0):  # padding attends to nothing and evicts nothing
            heads = slice(g * K // G, (g + 1) * K // G)
            own = None if sinks is None else sinks[b, heads].flatten()
            ranges = None if slots.ranges is None else slots.ranges[b : b + 1]
            group = _Group(bound, slots.position[b, g], importance[b, g], keys[b, heads], values[b, heads], ranges)
            output[b, heads], taken, evicted = group.read(query[b, heads], t, scoring, own)
            if share is not None and taken is not None:
                share[b, heads] = taken.view(-1, R).to(share.dtype)
            evictions += [(b, g, *one) for one in evicted]
    return output, evictions


class _Group(NamedTuple):
    """The slots of a group of heads in one sequence; position and importance are changed in place."""

    bound: Bound
    position: Tensor  # [S]
    importance: Tensor  # [S]
    keys: Tensor  # [K, S, D]
    values: Tensor  # [K, S, Dv]
    ranges: Tensor | None  # [1, RANGES, 2]

    def read(
        self, query: Tensor, t: int, scoring: Scoring, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None, list[tuple[int, int]]]:
        """Attend, observe and evict for token t, query [K, R, D], sinks [M].

        Returns the output, the share [M] of the sinks, and what was evicted with its time.
        """
        evicted = [(j, t - 1) for j in self._expire(t)]
        held = self.position.argsort()[int((self.position < 0).sum()) :]
        position, keys, values = self.position[held].long(), self.keys[:, held], self.values[:, held]
        attention, share = _attend(query, position, keys, scoring, sinks)
        output = attention.view(*query.shape[:2], -1).to(values.dtype) @ values
        rank = _score(self.bound.policy, Candidates(attention, self.importance[held], keys, values, position))
        self.importance[held] = rank.to(self.importance.dtype)
        if len(held) > self.bound.size:
            lowest = _lowest(rank, self._hide_protected(position), self.bound, t)
            evicted.append((int(position[lowest]), t))
            self.position[held[lowest]] = -1
        return output, share, evicted

    def _expire(self, t: int) -> list[int]:
        """Free the slots of tokens outside the window -> their positions."""
        if self.bound.window is None:
            return []
        position = self.position if self.bound.sliding else self._hide_protected(self.position)
        expired = (position >= self.bound.spared) & (position <= t - self.bound.window)
        positions: list[int] = self.position[expired].tolist()
        self.position.masked_fill_(expired, -1)
        return positions

    def _hide_protected(self, position: Tensor) -> Tensor:
        return hide_protected(position[None, None], self.ranges)[0, 0]


def _attend(
    query: Tensor, position: Tensor, keys: Tensor, scoring: Scoring, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The attention [M, N] of the newest token, query [K, R, D], over the rows of its group, keys [K, N, D], and the
    share [M] of the sinks.
    """
    if scoring.repositioning is not None:
        new_position = scoring.repositioning.spacing.reposition_sorted(position)
        query = scoring.repositioning.rerotate(query, position[-1:], new_position[-1:])
        keys = scoring.repositioning.rerotate(keys, position, new_position)
    scores = scoring(query[None], keys[None]).flatten(0, 2)
    scores = scores.to(torch.float32 if scores.device.type == "mps" else torch.float64)
    attention = scores.softmax(-1)
    if sinks is None:
        return attention, None
    lead = sinks - scores.logsumexp(-1)
    return attention * (-lead).sigmoid()[:, None], lead.sigmoid()


def _score(policy: Policy, candidates: Candidates) -> Tensor:
    """The ranks [N] that the policy's function gives the candidates, as floating-point numbers."""
    assert isinstance(policy, ScoredPolicy)
    count, rank = len(candidates.positions), policy.score(candidates)
    if not isinstance(rank, Tensor) or rank.shape != (count,):
        found = f"a tensor {list(rank.shape)}" if isinstance(rank, Tensor) else f"a {type(rank).__name__}"
        raise UsageError(f"policy {policy.name!r}: its score returned {found}; must be a tensor [{count}], one per row")
    rank = rank.detach().to(candidates.positions.device)
    return rank if rank.is_floating_point() else rank.to(candidates.attention.dtype)


def _lowest(rank: Tensor, position: Tensor, bound: Bound, t: int) -> int:
    """The oldest of the rows with the lowest rank; positions are in ascending order, -1 for protected rows."""
    free = (position >= bound.policy.first) & (position <= t - bound.recent)
    ranked = rank.masked_fill(~free | rank.isnan(), torch.inf)
    return int((free & (ranked == ranked.min())).int().argmax())
