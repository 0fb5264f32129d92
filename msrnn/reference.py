"""The definition, token by token, in plain torch: every faster implementation is tested against it.

One layer and one sequence, without padding or slots, and not optimized, so that it can be compared with the paper.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.bound import Bound
from msrnn.core.rope import Repositioning
from msrnn.core.slots import HELD
from msrnn.core.weight_network import MOST_DEVIATION, MOST_EXPONENT, WeightNetwork
from msrnn.policy import RANDOM


class Recurrence(NamedTuple):
    output: Tensor  # [H, T, Dv]
    evicted_at: Tensor  # [G, T]: the last step that saw the token, or HELD
    margin: Tensor  # [G, T]: relative difference of the two lowest ranks at each step; inf where nothing was evicted


class RecallAt(NamedTuple):
    """Tokens `first` to `last` recall rows together; tokens from `first` to before `until` attend to them."""

    first: int
    last: int
    until: int


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
    recalls: Sequence[RecallAt] = (),
    reach: int = 0,
    layer: int = 0,
    network: WeightNetwork | None = None,
) -> Recurrence:
    """query [H, T, D], key [K, T, D], value [K, T, Dv], sinks [H]; bound None: nothing is evicted.

    Without `repositioning`, keys stay as the model rotated them. `protected` are positions of tokens that are never
    evicted, as the `first` tokens are not. With `recalls`, tokens attend to recalled rows as well; where keys are
    re-rotated, these are all `reach` positions before the query. `layer` is the layer's index in its model,
    and `network` has its learned row weights.
    """
    groups = bound.groups(key.shape[0]) if bound else 1
    parts = [
        _one_group(
            *(q, k, v, bound, scale, softcap, s, repositioning, protected if bound and bound.protects else ()),
            *(recalls, reach, _weigh(k, v, bound, layer, group, network) if bound else []),
        )
        for group, (q, k, v, s) in enumerate(
            zip(
                query.chunk(groups),
                key.chunk(groups),
                value.chunk(groups),
                sinks.chunk(groups) if sinks is not None else [None] * groups,
                strict=True,
            )
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
    recalls: Sequence[RecallAt],
    reach: int,
    weight: list[float],
) -> Recurrence:
    """The heads of one group, which evict the same token; weight of each token."""
    share = query.shape[0] // key.shape[0]  # query heads that share a KV head
    key, value = key.repeat_interleave(share, 0), value.repeat_interleave(share, 0)
    length = query.shape[1]
    held: list[int] = []
    importance: dict[int, float] = {}
    evicted_at = torch.full((1, length), HELD)
    margin = torch.full((1, length), math.inf)
    outputs = []
    blocks = {block.first: block for block in recalls}
    guests = _Guests.none(key, value)
    until = 0
    for t in range(length):
        # recall
        if bound and bound.recall and t in blocks:
            (_, last, until), queries = blocks[t], query[:, t : blocks[t].last + 1]
            shares = _recall_shares(queries, key[:, : last + 1], share, scale, softcap, repositioning, reach)
            seen = [j for j in held if j not in _find_expired(held, t, bound, protected)]
            guests, close = _Guests.choose(shares, seen, bound.recall.rows, key, value, t)
            margin[0, t] = close
        if t == until:
            guests = _Guests.none(key, value)

        # append
        if bound:
            for j in _find_expired(held, t, bound, protected):
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
        scores = _score(newest, kept, scale, softcap)
        asked = _score(query[:, t, None], guests.stand(t - reach, repositioning), scale, softcap)
        if bound and bound.sliding and bound.window is not None:
            asked = asked.masked_fill(guests.position <= t - bound.window, -math.inf)
        scores = torch.cat([scores, asked], dim=-1)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].float()], dim=-1)
        weights = scores.double().softmax(-1)  # ranks may be far below the least float32 number
        attention = weights[:, : len(held)]
        of_guests = weights[:, len(held) : len(held) + asked.shape[1]]
        outputs.append(
            (attention[..., None].to(value.dtype) * value[:, held]).sum(1)
            + (of_guests[..., None].to(value.dtype) * guests.value).sum(1)
        )
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
            rank = {j: _rank(weight[j] if bound.policy.weights == RANDOM else importance[j] * weight[j]) for j in free}
            ranked = sorted(free, key=lambda j: (rank[j], j))
            if len(ranked) > 1:
                margin[0, t] = min(float(margin[0, t]), _margin(rank[ranked[0]], rank[ranked[1]]))
            held.remove(ranked[0])
            evicted_at[0, ranked[0]] = t
    return Recurrence(torch.stack(outputs, dim=1), evicted_at, margin)


def _weigh(
    key: Tensor, value: Tensor, bound: Bound, layer: int, group: int, network: WeightNetwork | None
) -> list[float]:
    """The weight of each token, which multiplies its importance, or ranks it alone where the policy is random.

    key [K, T, D] and value [K, T, Dv] of the heads of one group
    """
    if bound.policy.learned and network is not None:
        return _weigh_by_network(key, value, network, group)
    if bound.policy.weights == RANDOM:
        own = _scramble(_scramble(layer) + group)
        return [(_scramble(_scramble(j) ^ own) >> 8) / 2**24 for j in range(value.shape[1])]
    if bound.policy.value_norm:
        return value.float().square().sum((0, 2)).sqrt().tolist()
    return [1.0] * value.shape[1]


def _weigh_by_network(key: Tensor, value: Tensor, network: WeightNetwork, group: int) -> list[float]:
    """(|v| exp g)^(1 / alpha) of each token; g is the mean over the heads of the group."""
    if network.rope is not None:
        position = torch.arange(key.shape[1])
        key = network.rope.rotate(key, network.rope.angle(position, torch.zeros_like(position)))
    graded = torch.zeros(key.shape[1], dtype=torch.float64)
    for i in range(len(key)):
        head = group * len(key) + i
        inputs = torch.cat([key[i], value[i]], dim=-1).double()
        inputs = ((inputs - network.mean[head]) / network.scale[head]).clamp(-MOST_DEVIATION, MOST_DEVIATION)
        x = inputs @ network.hidden[head].double().T + network.hidden_bias[head]
        gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        graded += (gelu @ network.output[head].double() + network.output_bias[head]) / len(key)
    norm = value.double().square().sum((0, 2)).sqrt()
    exponent = (norm.log() + graded) / network.alpha
    return exponent.clamp(-MOST_EXPONENT, MOST_EXPONENT).exp().tolist()


def _scramble(number: int) -> int:
    """The 32-bit finalizer of MurmurHash3, a permutation without a pattern."""
    number %= 2**32
    number = (number ^ number >> 16) * 0x85EBCA6B % 2**32
    number = (number ^ number >> 13) * 0xC2B2AE35 % 2**32
    return number ^ number >> 16


def _find_expired(held: list[int], t: int, bound: Bound, protected: Collection[int]) -> list[int]:
    """The held tokens that leave their window when token t is appended."""
    if bound.window is None:
        return []
    spared = () if bound.sliding else protected
    return [j for j in held if bound.spared <= j <= t - bound.window and j not in spared]


def _score(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    """query [H, 1, D], key [H, N, D] -> [H, N]"""
    scores = (query * key).sum(-1).float() * scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


class _Guests(NamedTuple):
    """Recalled rows, for each query head those of its KV head."""

    key: Tensor  # [H, n, D]
    value: Tensor  # [H, n, Dv]
    position: Tensor  # [H, n]

    @classmethod
    def none(cls, key: Tensor, value: Tensor) -> _Guests:
        return cls(key[:, :0], value[:, :0], torch.zeros(len(key), 0, dtype=torch.long))

    @classmethod
    def choose(
        cls,
        shares: Tensor,
        held: list[int],
        rows: int,
        key: Tensor,
        value: Tensor,
        first: int,
    ) -> tuple[_Guests, float]:
        """The tokens before `first` with the largest shares [H, N] that are not held, and how close the choice was."""
        others = [j for j in range(first) if j not in held]
        chosen, close = [], math.inf
        for share in shares[:, others].tolist():
            ranked = sorted(range(len(others)), key=lambda i: (-share[i], others[i]))
            chosen.append(sorted(others[i] for i in ranked[:rows]))
            if len(others) > rows:
                close = min(close, _margin(share[ranked[rows]], share[ranked[rows - 1]]))
        position = torch.tensor(chosen, dtype=torch.long).view(len(key), -1)
        rows_of = [x.gather(1, position[..., None].expand(*position.shape, x.shape[-1])) for x in (key, value)]
        return cls(rows_of[0], rows_of[1], position), close

    def stand(self, at: int, repositioning: Repositioning | None) -> Tensor:
        """Their keys, all re-rotated to one position, if any are."""
        if repositioning is None:
            return self.key
        return repositioning.rerotate(self.key, self.position, torch.full_like(self.position, at))


def _recall_shares(
    query: Tensor,
    key: Tensor,
    share: int,
    scale: float,
    softcap: float | None,
    repositioning: Repositioning | None,
    reach: int,
) -> Tensor:
    """What recall ranks archived tokens by, [H, N]: their largest attention from any query of a block.

    query [H, T, D], key [H, N + T, D]. Attention is over all archived tokens and the block itself, as if nothing had
    been evicted, and the mean over the `share` query heads of a KV head.
    """
    T, first = query.shape[1], key.shape[1] - query.shape[1]
    archived = key[:, :first]
    if repositioning is not None:
        position = torch.arange(first)
        archived = repositioning.rerotate(archived, position, torch.full_like(position, first - reach))
    largest = torch.full((len(query), first), -math.inf)
    for i in range(T):
        seen = torch.cat([archived, key[:, first : first + i + 1]], 1)
        attention = _score(query[:, i, None], seen, scale, softcap).double().softmax(-1)[:, :first]
        mean = attention.unflatten(0, (-1, share)).mean(1).repeat_interleave(share, 0)
        largest = torch.maximum(largest, mean.float())
    return largest


def _rank(importance: float) -> float:
    """NaN is evicted last."""
    return math.inf if math.isnan(importance) else importance


def _margin(least: float, next_least: float) -> float:
    """The relative difference of two ranks: 0 for a tie, even of infinities."""
    if least == next_least:
        return 0.0
    return math.inf if math.isinf(next_least) else (next_least - least) / abs(next_least)
