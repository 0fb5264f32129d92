"""The unmodified model, which keeps every token: with a static cache in CUDA graphs, and with transformers' default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from msrnn.evaluation.efficiency.contenders import Contender, Setup, Step, random_tokens, row_bytes
from msrnn.evaluation.efficiency.timing import captured

BUCKET = 512


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention, of those that transformers knows by name."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def unmodified(model: PreTrainedModel) -> AbstractContextManager[None]:
    """The model as transformers runs it by default."""
    return attending(model, "sdpa")


class PlacedLayer(StaticLayer):
    """A static layer that writes at a `position` [1] which all layers share and whoever steps moves.

    A position that each layer counted for itself would run past the end as a graph is replayed.
    """

    def __init__(self, rows: int, position: Tensor) -> None:
        super().__init__(max_cache_len=rows)
        self.position = position
        self.cumulative_length = position  # type: ignore[assignment]  # what transformers' own layer has there

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.keys, self.values


def placed_cache(model: PreTrainedModel, rows: int, position: Tensor) -> Cache:
    layers = StaticCache(config=model.config, max_cache_len=rows).layers
    return Cache(layers=[PlacedLayer(rows, position) for _ in layers])


class StaticFull(Contender):
    """A static cache that grows by buckets of rows, each with its graph, so that a step reads little that is empty.

    To grow is to copy, and to hold old and new at once: neither is held against it.
    """

    label, size = "full", None

    def __init__(self, setup: Setup) -> None:
        self.model, self.rows = setup.model, setup.length
        self.nbytes = setup.length * row_bytes(setup.shapes)
        self.buckets = (*range(BUCKET, setup.length, BUCKET), setup.length)

    @staticmethod
    def possible(model: PreTrainedModel) -> bool:
        """Sliding and linear layers have static caches of other kinds, which cannot be captured as they are."""
        return all(type(layer) is StaticLayer for layer in StaticCache(config=model.config, max_cache_len=1).layers)

    @contextmanager
    def stepping(self, batch: int, rows: int) -> Iterator[Step]:
        device = self.model.device
        position = torch.full((1,), rows - 1, device=device)
        cache = placed_cache(self.model, rows, position)
        ids = random_tokens(self.model, batch)

        def step() -> object:
            places = position.expand(batch, 1)
            return self.model(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True)

        with unmodified(self.model), torch.no_grad():
            step()
            for layer in cache.layers:
                assert isinstance(layer, PlacedLayer)
                assert layer.keys is not None
                assert layer.values is not None
                layer.keys.normal_()
                layer.values.normal_()
            yield captured(step, device)

    @torch.no_grad()
    def _prefill(self, input_ids: Tensor) -> object:
        with unmodified(self.model):
            return self.model(input_ids, logits_to_keep=1, use_cache=False)

    def reading(self, input_ids: Tensor) -> Step:
        return lambda: self._prefill(input_ids)


class DynamicFull(Contender):
    """transformers' default: a cache that is concatenated anew for every token, and no graph."""

    label, size, buckets = "full, dynamic", None, ()

    def __init__(self, setup: Setup) -> None:
        self.model, self.shapes, self.rows = setup.model, setup.shapes, setup.length
        self.nbytes = setup.length * row_bytes(setup.shapes)

    @contextmanager
    def stepping(self, batch: int, rows: int) -> Iterator[Step]:
        cache = DynamicCache(config=self.model.config)
        self._fill(cache, batch, rows - 1)
        ids = random_tokens(self.model, batch)
        position = torch.full((batch, 1), rows - 1, device=self.model.device)

        def step() -> None:
            self.model(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True)
            for layer in cache.layers:
                if type(layer) is DynamicLayer:
                    layer.crop(-1)  # every step is taken at the same length

        with unmodified(self.model), torch.no_grad():
            yield step

    def _fill(self, cache: Cache, batch: int, rows: int) -> None:
        for i, shape in enumerate(self.shapes):
            if shape and rows:
                sizes = (batch, shape.kv_heads, rows)
                keys = torch.randn(*sizes, shape.key_dim, dtype=shape.dtype, device=shape.device)
                values = torch.randn(*sizes, shape.value_dim, dtype=shape.dtype, device=shape.device)
                cache.update(keys, values, i)

    def reading(self, _: Tensor) -> None:
        return None
