"""ModelSpec: what a model's layers are. A model is inspected once, and left as it was."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from msrnn.core.rope import Rope
from msrnn.core.shards import Shards
from msrnn.errors import UsageError
from msrnn.hf.fingerprint import addresses_of, digest_of, fingerprint_of, inner_tensors
from msrnn.hf.handover import msrnn_attention
from msrnn.hf.inspect_layers import (
    RecordedLayer,
    check_split,
    check_takes_positions,
    host_layers,
    inspect_layers,
    inspect_rope,
)
from msrnn.hf.tensor_parallel import check_groups_divide, check_heads_divide, is_split, shards_of


class ModelSpec:
    """The kinds of a model's layers. Everything that costs a forward pass is computed once, when it is first needed."""

    def __init__(self, model: PreTrainedModel, fingerprint: str) -> None:
        self.reference = weakref.ref(model)
        self.fingerprint = fingerprint  # identifies the model by its weights
        self.config = model.config.get_text_config(decoder=True)
        self.windows = sliding_windows(model, self.config)
        self.shards = shards_of(model)
        if self.shards is not None:
            check_heads_divide(model, self.config, self.shards)
        with msrnn_attention(model):
            layers = inspect_layers(model, self.config)
        self.layers: list[RecordedLayer | None] = [  # None: linear attention
            layer and _with_shards(layer, self.shards, self.config) for layer in layers
        ]
        self.last_position = _last_position(model, self.config)

    @property
    def model(self) -> PreTrainedModel:
        model = self.reference()
        if model is None:
            raise UsageError("the model of this spec no longer exists: inspect another")
        return model

    @property
    def architecture(self) -> str:
        """The model's name, class and sizes, for messages."""
        sizes = {"layers": "num_hidden_layers", "hidden size": "hidden_size", "vocabulary": "vocab_size"}
        known = [f"{what} {value}" for what, name in sizes.items() if (value := getattr(self.config, name, None))]
        name = PurePath(str(self.model.config.name_or_path or "")).name  # of a folder, or without its owner on the hub
        return f"{name} {type(self.model).__name__}({', '.join(known)})".lstrip()

    @property
    def dtype(self) -> str:
        """The name of the dtype that the layers compute in, or several names joined by "/"."""
        return "/".join(sorted({str(layer.shape.dtype).removeprefix("torch.") for layer in self.layers if layer}))

    @cached_property
    def rounded_fingerprint(self) -> str:
        """Identifies the model by its weights, whether they are in float32 or in bfloat16."""
        return fingerprint_of(self.model, rounded=True)

    @cached_property
    def rope_digest(self) -> str:
        """Identifies the parameters of its rotary embeddings, which are not among the weights."""
        parameters = getattr(self.config, "rope_parameters", None)
        return digest_of(json.dumps(parameters, sort_keys=True, default=str).encode())

    @cached_property
    def ropes(self) -> list[Rope | None]:
        """The RoPE of each layer; raises where keys cannot be re-rotated."""
        with msrnn_attention(self.model):
            return inspect_rope(self.model, self.config)

    def check_readable(self, in_blocks: bool) -> None:
        """Refuse a model whose results would be silently wrong. `in_blocks`: as in `state_spec`."""
        if in_blocks:
            _ = self._takes_positions
        if None in self.layers:
            _ = self._splits_in_blocks if in_blocks else self._splits

    @cached_property
    def _takes_positions(self) -> bool:
        with msrnn_attention(self.model):
            check_takes_positions(self.model, self.config, self.layers)
        return True

    @cached_property
    def _splits(self) -> bool:
        with msrnn_attention(self.model):
            check_split(self.model, self.config, in_blocks=False)
        return True

    @cached_property
    def _splits_in_blocks(self) -> bool:
        with msrnn_attention(self.model):
            check_split(self.model, self.config, in_blocks=True)
        return True


def _with_shards(layer: RecordedLayer, shards: Shards | None, config: Any) -> RecordedLayer:
    """Some models split their weights and gather their projections: there, every process has all heads."""
    if layer.shape.heads == getattr(config, "num_attention_heads", None) or not is_split(layer.module):
        return layer
    check_groups_divide(layer.module, layer.shape)
    return layer._replace(shape=replace(layer.shape, shards=shards))


_SPECS: weakref.WeakKeyDictionary[nn.Module, tuple[int, ModelSpec]] = weakref.WeakKeyDictionary()


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """The spec of a model; the last one is reused if neither weights nor config have changed since."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(_not_a_model(model))
    if model.device.type == "meta":
        raise UsageError(f"{type(model).__name__} is on the meta device: load its weights first")
    fingerprint = fingerprint_of(model)
    version = _version(model, fingerprint)
    known = _SPECS.get(model)
    if known is None or known[0] != version:
        _SPECS[model] = known = (version, ModelSpec(model, fingerprint))
    return known[1]


def _not_a_model(given: Any) -> str:
    name = type(given).__name__
    if isinstance(getattr(given, "_orig_mod", None), nn.Module):
        return (
            f"{name} is a model that torch.compile has wrapped: pass the model itself, and let "
            "MultiStateRNN(model, compile=True) compile it"
        )
    if callable(getattr(given, "merge_and_unload", None)):
        return f"{name} is a model with adapters around it: merge them, and pass model.merge_and_unload()"
    if isinstance(getattr(given, "module", None), PreTrainedModel):
        return f"{name} is a wrapper around a model: pass the model itself, model.module"
    return f"{name} is not a transformers model: load one with AutoModelForCausalLM"


def _version(model: PreTrainedModel, fingerprint: str) -> int:
    """Changes when weights, the config or autocast change; weights that are updated in place or moved count as well."""
    kind = model.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    weights = [_weight_version(weight) for weight in (*model.parameters(), *model.buffers())]
    config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    return hash((fingerprint, config, autocast, *weights))


def _weight_version(weight: Tensor) -> tuple[Any, ...]:
    versions = [None if part.is_inference() else part._version for part in inner_tensors(weight)]
    return *addresses_of(weight), *versions, weight.dtype, weight.device


def sliding_windows(model: PreTrainedModel, config: Any) -> list[int | None]:
    """The sliding window of each layer, None where it has none; refuses, with the reason, what cannot be bounded."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UsageError(f"{name} is an encoder-decoder: msrnn bounds decoders, whose KV cache grows with the text")
    if getattr(config, "num_kv_shared_layers", None):
        raise UsageError(
            f"{name} has layers that share the KV rows of others, and those cannot be evicted by one layer alone"
        )
    layers = host_layers(config)
    known = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
    odd = {type(layer).__name__ for layer in layers if type(layer) not in known}
    if "chunked_attention" in (getattr(config, "layer_types", None) or []):
        odd.add("chunked attention")
    if odd:
        raise UsageError(f"{name} caches with {', '.join(sorted(odd))}, which msrnn does not know how to bound")
    if all(isinstance(layer, LinearAttentionLayer) for layer in layers):
        raise UsageError(f"{name} has no attention layer: its state is bounded already")
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _last_position(model: PreTrainedModel, config: Any) -> int | None:
    """The last position of a model with a table of learned positions; None: positions have no end."""
    known = getattr(config, "max_position_embeddings", None)
    if not known or getattr(config, "rope_parameters", None):
        return None
    words = model.get_input_embeddings()
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    return int(known) - 1 if any(0 <= n - known <= 2 for n in tables) else None
