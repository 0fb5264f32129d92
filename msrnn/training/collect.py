"""Read chunks with a bounded state, and collect the decisions of its layers with their true consequences.

Before a block of tokens is read, the slots of a layer hold what the policy has kept. The queries of the block say what
these rows are worth: their attention is computed as if the block evicted nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.bound import Bound
from msrnn.core.change import sum_changes
from msrnn.core.rope import Rope
from msrnn.core.row_weights import sum_squares
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots
from msrnn.core.weight_network import network_inputs
from msrnn.core.weights_file import HeadShape
from msrnn.hf.cache_layers import StateLayer
from msrnn.hf.learned_weights import find_ropes, head_shapes
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.state_spec import StateSpec
from msrnn.training.decisions import Decisions

_LEAST = 1e-30  # of importances and norms, before their logarithm
FAR = 64.0  # of inputs: from here on float16 has fewer than two digits after the point
_NEVER = 50.0  # the logarithm of the importance of a slot without a row


class Stack(NamedTuple):
    """Layers whose heads have the same shape, which are trained together."""

    shape: HeadShape
    layers: tuple[int, ...]  # the model's own indices


def find_stacks(spec: StateSpec) -> list[Stack]:
    """The layers in which the policy chooses, by the shape of their heads."""
    found: dict[HeadShape, list[int]] = defaultdict(list)
    for i, (shape, bound) in enumerate(zip(head_shapes(spec.model), spec.bounds, strict=True)):
        if shape is not None and bound is not None and bound.protects:
            found[shape].append(i)
    return [Stack(shape, tuple(layers)) for shape, layers in found.items()]


@torch.no_grad()
def collect_decisions(
    rnn: MultiStateRNN,
    stacks: Sequence[Stack],
    chunks: Tensor,
    moments: Sequence[int],
    ahead: int,
    on_tokens: Callable[[int], object] = lambda _: None,
) -> list[Decisions]:
    """Read chunks [B, T] together -> the decisions of each stack after each number of tokens in `moments`.

    `ahead` tokens are read at once; the moments are multiples of it.
    """
    cache, chunks = rnn.cache(), chunks.to(rnn.device)
    watched = {i: _watch(rnn.spec, i, cache.layers[i]) for stack in stacks for i in stack.layers}
    for i, layer in watched.items():
        cache.layers[i] = layer
    for start in range(0, max(moments) + 1, ahead):
        for layer in watched.values():
            layer.watching = start in moments
        block = chunks[:, start : start + ahead]
        rnn.model(input_ids=block, past_key_values=cache, use_cache=True, logits_to_keep=1)
        on_tokens(block.numel())
    return [_stack_layers([watched[i].decisions for i in stack.layers]) for stack in stacks]


def _stack_layers(layers: Sequence[Sequence[Decisions]]) -> Decisions:
    """The decisions [B, 1, ...] of each layer at its moments -> those of all layers [moments * B, L, ...]"""
    joined = [Decisions(*map(torch.cat, zip(*decisions, strict=True))) for decisions in layers]
    return Decisions(*(torch.cat(fields, 1) for fields in zip(*joined, strict=True)))


def _watch(spec: StateSpec, index: int, layer: StateLayer) -> _WatchedLayer:
    bound = spec.bounds[index]
    assert bound is not None
    return _WatchedLayer(layer, find_ropes(spec.model, bound.policy)[index])


class _WatchedLayer(StateLayer):
    """A layer of a state that notes what it may evict, before it reads a block of tokens."""

    def __init__(self, layer: StateLayer, rope: Rope | None) -> None:
        super().__init__(layer.setup, layer.index, layer.cached)
        self.rope, self.decisions, self.watching = rope, list[Decisions](), False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scoring: Scoring) -> Tensor:
        if self.watching and isinstance(self.memory, Slots):
            self.decisions.append(observe(self.memory, query, key, value, scoring, self.rope))
        return super().attend(query, key, value, real, scoring)


def observe(slots: Slots, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, rope: Rope | None) -> Decisions:
    """The decisions [B, 1, ...] of a layer at its next token; query [B, H, T, D], key and value [B, K, T, D] follow.

    The first query completes the importances, and all others are the future.
    """
    (B, H, T, _), K, G = query.shape, key.shape[1], slots.position.shape[1]
    position, slot = _order_slots(slots)
    rows = slot.repeat_interleave(K // G, 1)[..., None]
    keys, values = (held.gather(2, rows.expand(-1, -1, -1, held.shape[-1])) for held in slots.dequantized())
    seen = _find_visible(slots.bound, position, slots.seen, T).repeat_interleave(H // G, 1)
    attention = _attend_all(query, torch.cat([keys, key], 2), scoring, seen)
    output = torch.matmul(attention.view(B, K, -1, attention.shape[-1]), torch.cat([values, value], 2).float())
    chosen = slice(*_find_candidates(slots.bound))
    attention = attention[..., chosen]
    importance = attention[:, :, 0].unflatten(1, (G, -1)).mean(2)
    if slots.importance is not None:
        before = slots.importance.gather(2, slot)[..., chosen]
        importance = importance + (slots.bound.policy.decay or 0.0) * before
    keys, values, held = keys[:, :, chosen], values[:, :, chosen].float(), position[..., chosen]
    heads = values.repeat_interleave(H // K, 1)
    changes = sum_changes(attention[:, :, 1:], output.view(B, H, T, -1)[:, :, 1:], heads).unflatten(1, (G, -1)).sum(2)
    free = held < 0
    inputs = network_inputs(keys, values, held.clamp(min=0).repeat_interleave(K // G, 1), rope)
    found = (
        _shorten(inputs),
        importance.clamp(min=_LEAST).log().masked_fill(free, _NEVER),
        sum_squares(values, G).clamp(min=_LEAST).log() / 2,
        changes.masked_fill(free, 0),
    )
    return Decisions(*(tensor[:, None] for tensor in found))


def _shorten(inputs: Tensor) -> Tensor:
    """In float16, unless the keys of a model are so far from 0 that too little of them would be left."""
    return inputs.half() if bool(inputs.abs().amax() < FAR) else inputs


def _order_slots(slots: Slots) -> tuple[Tensor, Tensor]:
    """Positions [B, G, size] in ascending order, and their slots; without the slot that is always free."""
    ordered = slots.position.sort(-1)
    return ordered.values[..., 1:], ordered.indices[..., 1:]


def _find_candidates(bound: Bound) -> tuple[int, int]:
    """The rows that are not protected when the next token is appended, in the order of their positions."""
    return bound.policy.first, bound.size - max(bound.recent - 1, 0)


def _find_visible(bound: Bound, position: Tensor, seen: Tensor, columns: int) -> Tensor:
    """[B, G, T, size + T]: the rows that each of the next tokens attends to."""
    new = seen[:, None, None] + torch.arange(columns, device=position.device)  # [B, 1, T]
    every = torch.cat([position, new.expand(-1, position.shape[1], -1)], -1)[:, :, None]
    query = new[..., None]
    visible = (every >= 0) & (every <= query)
    if bound.window is not None:
        visible &= (every > query - bound.window) | (every < bound.spared)
    return visible


def _attend_all(query: Tensor, keys: Tensor, scoring: Scoring, visible: Tensor) -> Tensor:
    """The attention [B, H, T, N] float32 of queries [B, H, T, D] to keys [B, K, N, D]."""
    (B, H, T, D), K = query.shape, keys.shape[1]
    scores = scoring(query.reshape(B, K, -1, D), keys).view(B, H, T, -1).masked_fill(~visible, -torch.inf)
    sinks = scoring.sinks_of(B, 1, T)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(B, H, T, 1)], -1)
    return scores.softmax(-1)[..., : keys.shape[2]]
