"""The seam with transformers: a cache that counts columns, an attention function and a mask, registered by name.

`update()` hands the new keys on with their owner attached; the attention function finds the owner and lets it append,
attend, observe and evict. Nothing is patched, hooked or copied, and models that did not ask are not affected.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from msrnn.attention import Record, Scoring, attend, attend_unbounded, plain_attention
from msrnn.policy import FULL, Bound, Policy, layer_bound, resolve
from msrnn.state import Growing, LayerShape, MultiState, Slots

NAME = "msrnn"
DEFAULT_CHUNK = 128
Memory = Slots | Growing


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D], key and value [B, K, T, D] -> [B, T, H, D].

    Dropout is not among the arguments that matter: a state that forgets is for inference.
    """
    scoring = Scoring(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap, s_aux)
    owner = getattr(key, "owner", None)
    if position_bias is not None:
        raise ValueError("this model adds a bias by distance to its scores, which msrnn does not know how to keep")
    if owner is None:
        return plain_attention(query, key, value, attention_mask, scoring).contiguous(), None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        raise ValueError("bounded states carry no gradient: call the model under torch.no_grad()")
    return owner.attend(query, key, value, _real(attention_mask), scoring).contiguous(), None


def _real(mask: Tensor | None) -> Tensor | None:
    """[B, T], False where padding: a token sees itself unless it is padding, so it is the mask's diagonal."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise TypeError(f"attention mask of {mask.dtype}: pass a 2-D mask of ones and zeros (1 for a token)")
    return mask[:, 0].diagonal(dim1=-2, dim2=-1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _OwnedLayer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers sees of one layer. Columns are counted from where the cache was handed over."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.columns = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        active = self.config._attn_implementation
        if active != NAME:
            raise ValueError(
                f"the model's attention is now {active!r}, which cannot read bounded states: "
                f"call model.set_attn_implementation({NAME!r})"
            )
        self.lazy_initialization(key_states, value_states)
        self.columns += key_states.shape[2]
        key_states.owner = self
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.columns

    def get_max_length(self) -> int:
        return -1


class _Probe(_OwnedLayer):
    """Learns what a layer's states are made of from the first token that passes."""

    shape: LayerShape | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, scoring: Scoring) -> Tensor:
        self.shape = LayerShape(query.shape[1], key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        return plain_attention(query, key, value, None, scoring)


class _StateLayer(_OwnedLayer):
    """A layer's memory as transformers' cache layer; without one, it is made for the first batch that comes."""

    def __init__(
        self,
        config: Any,
        memory: Memory | Callable[[int], Memory],
        chunk: int,
        columns: int = 0,
        record: Record | None = None,
    ) -> None:
        super().__init__(config)
        self.memory, self.chunk, self.columns, self.record = memory, chunk, columns, record

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not isinstance(self.memory, Memory):
            self.memory = self.memory(key_states.shape[0])
        super().lazy_initialization(key_states, value_states)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scoring: Scoring) -> Tensor:
        memory = self.memory
        assert isinstance(memory, Memory)
        if query.shape[0] != memory.batch_size:
            raise ValueError(f"a batch of {query.shape[0]} does not fit a state of {memory.batch_size} rows")
        if isinstance(memory, Growing):
            return attend_unbounded(memory, query, key, value, real, scoring)
        return attend(memory, query, key, value, real, scoring, self.chunk, self.record)

    def reset(self) -> None:
        self.columns = 0
        if isinstance(self.memory, Memory):
            self.memory.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if isinstance(self.memory, Memory):
            self.memory.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if isinstance(self.memory, Memory):
            self.memory = self.memory.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if isinstance(self.memory, Memory):
            self.batch_select_indices(torch.arange(self.memory.batch_size).repeat_interleave(repeats))

    def crop(self, _: int) -> None:
        raise ValueError("a bounded state cannot take tokens back, as assisted decoding asks: use a full cache for it")

    def offload(self) -> None:
        raise ValueError("a bounded state stays on its device: it is small, do not offload it")


class LinearLayer:
    """A linear-attention layer's own cache, whose size is fixed already, carried along in a `MultiState`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def nbytes(self) -> int:
        states = [*self.layer.conv_states.values(), *self.layer.recurrent_states.values()]
        return sum(state.nbytes for state in states if state is not None)

    def select(self, rows: Tensor) -> LinearLayer:
        other = copy.deepcopy(self.layer)
        other.reorder_cache(rows)
        return LinearLayer(other)


@dataclass(frozen=True)
class Plan:
    """How a model's layers become states: what each is made of, and what it may hold."""

    config: Any
    shapes: list[LayerShape | None]  # None: a linear-attention layer
    bounds: list[Bound | None]  # None: the layer grows
    chunk: int
    fingerprint: dict[str, Any]

    def memory(self, layer: int, batch_size: int) -> Memory:
        shape, bound = self.shapes[layer], self.bounds[layer]
        assert shape is not None
        return Growing(batch_size, shape) if bound is None else Slots(batch_size, shape, bound)

    def state(self, batch_size: int) -> MultiState:
        linear = _host_layers(self.config)
        layers = [
            LinearLayer(linear[i]) if shape is None else self.memory(i, batch_size)
            for i, shape in enumerate(self.shapes)
        ]
        return MultiState(layers, self.fingerprint)

    def cache(self, state: MultiState, columns: int = 0, record: Callable[[int], Record] | None = None) -> Cache:
        """A state as a cache that says it has seen `columns` columns so far, whatever the state has."""
        return Cache(
            layers=[
                memory.layer
                if isinstance(memory, LinearLayer)
                else _StateLayer(self.config, memory, self.chunk, columns, record(i) if record else None)
                for i, memory in enumerate(state.layers)
            ]
        )


def plan(model: PreTrainedModel, policy: str | Policy, size: int | None, chunk: int) -> Plan:
    """Check that a model can be bounded, hand its attention to msrnn, and learn its layers from one token."""
    policy_, size = resolve(policy, size)
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"chunk={chunk!r}: must be a whole number of tokens, 1 or more")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{type(model).__name__} is not a transformers model: load one with AutoModelForCausalLM")
    config = model.config.get_text_config(decoder=True)
    windows = _windows(model, config)
    before = config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        shapes = _probe(model, config)
    except BaseException:
        model.set_attn_implementation(before)
        raise
    dtypes = {str(shape.dtype).removeprefix("torch.") for shape in shapes if shape}
    fingerprint = {
        "model": fingerprint_of(model),
        "policy": policy_.name if policy_ else FULL,
        "size": size,
        "dtype": "/".join(sorted(dtypes)),
    }
    bounds = [layer_bound(policy_, size, window) for window in windows]
    return Plan(config, shapes, bounds, chunk, fingerprint)


def _host_layers(config: Any) -> list[Any]:
    """The layers that transformers itself would cache with."""
    return list(DynamicCache(config=config).layers)


def _windows(model: PreTrainedModel, config: Any) -> list[int | None]:
    """Each layer's own sliding window; refuses, with the reason, what cannot be bounded."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: msrnn bounds decoders, whose states grow with the text")
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(f"{name} has layers that read the states of others: they cannot forget on their own")
    layers = _host_layers(config)
    odd = {type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    odd -= {type(layer).__name__ for layer in layers if type(layer) is LinearAttentionLayer}
    if "chunked_attention" in (getattr(config, "layer_types", None) or []):
        odd.add("chunked attention")
    if odd:
        raise ValueError(f"{name} caches with {', '.join(sorted(odd))}, which msrnn does not know how to bound")
    if all(isinstance(layer, LinearAttentionLayer) for layer in layers):
        raise ValueError(f"{name} has no attention layer: its state is bounded already")
    return [getattr(layer, "sliding_window", None) for layer in layers]


@torch.no_grad()
def _probe(model: PreTrainedModel, config: Any) -> list[LayerShape | None]:
    layers = [layer if isinstance(layer, LinearAttentionLayer) else _Probe(config) for layer in _host_layers(config)]
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, past_key_values=Cache(layers=layers), use_cache=True)
    for i, layer in enumerate(layers):
        if isinstance(layer, _Probe) and layer.shape is None:
            raise ValueError(
                f"{type(model).__name__}: the attention of layer {i} does not pass through transformers' "
                "AttentionInterface, so msrnn cannot reach it"
            )
    return [layer.shape if isinstance(layer, _Probe) else None for layer in layers]


def fingerprint_of(model: PreTrainedModel) -> str:
    """Tells models apart by what they compute: the shape and some values of every weight, not their file's name."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 16)].float().cpu()
        digest.update(f"{name}{list(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


class MultiStateCache(Cache):  # type: ignore[misc]
    """A bounded state for those who call `model.generate` or `model.forward` themselves."""

    def __init__(
        self, model: PreTrainedModel, policy: str | Policy = "tova", size: int | None = 512, chunk: int = DEFAULT_CHUNK
    ) -> None:
        self.plan = plan(model, policy, size, chunk)
        host = _host_layers(self.plan.config)
        super().__init__(
            layers=[
                host[i] if shape is None else _StateLayer(self.plan.config, partial(self.plan.memory, i), chunk)
                for i, shape in enumerate(self.plan.shapes)
            ]
        )

    @property
    def state(self) -> MultiState:
        """What the cache holds, as a state to save, fork or go on from."""
        layers = [layer.memory if isinstance(layer, _StateLayer) else LinearLayer(layer) for layer in self.layers]
        if not all(isinstance(layer, Memory | LinearLayer) for layer in layers):
            raise ValueError("this cache has read nothing yet, so it holds no state")
        return MultiState(layers, self.plan.fingerprint)
