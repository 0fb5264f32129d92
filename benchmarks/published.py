"""TOVA as it was published: eager attention, the mean over heads of the newest query's attention, top-k, and a gather.

    msrnn bench --with benchmarks.published:published

Each layer concatenates and gathers its cache again for every token, without a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from msrnn.evaluation.benchmark.contenders import Contender, Setup, Step, attending, random_tokens, row_bytes

NAME = "tova-published"


class PublishedLayer(DynamicLayer):
    """A cache layer that keeps the `size` states that the newest query attends to most, in order of age."""

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        view = keys.view_as(keys)  # a reference from the layer's own tensor to the layer would be a cycle
        view.owner = self
        return view, values

    def evict(self, attention: Tensor) -> None:
        """attention [B, H, 1, S] of the newest query."""
        assert self.keys is not None
        assert self.values is not None
        if self.keys.shape[2] <= self.size:
            return
        kept = attention[:, :, -1].mean(1).topk(self.size, dim=-1).indices.sort(-1).values
        self.keys = self._gathered(self.keys, kept)
        self.values = self._gathered(self.values, kept)

    @staticmethod
    def _gathered(states: Tensor, kept: Tensor) -> Tensor:
        return states.gather(2, kept[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, scaling: float, **__: Any
) -> tuple[Tensor, Tensor]:
    """transformers' attention interface, for one query [B, H, 1, D] at a time."""
    if query.shape[2] != 1:
        raise ValueError(f"{NAME} reads one token at a time, not {query.shape[2]}: pass one token per step")
    owner: PublishedLayer = key.owner  # type: ignore[attr-defined]
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    weights = (query @ keys.transpose(2, 3) * scaling).softmax(-1, dtype=torch.float32).to(query.dtype)
    owner.evict(weights)
    return (weights @ values).transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attention)


def cache_of(model: PreTrainedModel, size: int) -> Cache:
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return Cache(layers=[PublishedLayer(size) for _ in range(layers)])


class Published(Contender):
    def __init__(self, setup: Setup, size: int) -> None:
        if not all(setup.shapes):
            raise ValueError(f"{NAME}: this model has layers without attention")
        self.label = f"published tova {size}"
        self.size, self.rows, self.buckets = size, size, (size,)
        self.model, self.shapes = setup.model, setup.shapes
        self.nbytes = size * row_bytes(setup.shapes)

    @contextmanager
    def stepping(self, batch: int, rows: int) -> Iterator[Step]:
        cache = cache_of(self.model, self.size)
        for i, shape in enumerate(self.shapes):
            assert shape is not None
            keys = torch.randn(batch, shape.kv_heads, rows, shape.key_dim, dtype=shape.dtype, device=shape.device)
            cache.update(keys, torch.randn_like(keys), i)
        ids = random_tokens(self.model, batch)
        position = torch.full((batch, 1), rows, device=self.model.device)
        with attending(self.model, NAME), torch.no_grad():
            yield lambda: self.model(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True)

    def reading(self, _: Tensor) -> None:
        return None


def published(setup: Setup, size: int) -> Published:
    return Published(setup, size)
