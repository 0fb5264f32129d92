"""What becomes of a model: which layers can be bounded, what their states are made of, and how each may grow.

Learned from the model itself: transformers says how it would cache each layer, and one token shows the rest.
"""

from __future__ import annotations

import copy
import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from msrnn.backends import resolve_backend
from msrnn.core.device_memory import check_fits
from msrnn.core.quantization import parse_state_dtype
from msrnn.core.rope import FITTED, ORIGINAL, Gap, Repositioning, Spacing, name_of, spacing
from msrnn.core.slots import Growing, LayerShape, Memory, Slots
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.cache import NAME, LayerSetup, LinearLayer, OwnedCache, StateLayer
from msrnn.hf.inspect import check_driven, check_split, host_layers, inspect_layers, last_position
from msrnn.hf.inspect_rope import learn
from msrnn.layer import Record
from msrnn.policy import FULL, Bound, Policy, layer_bound, resolve


@dataclass(frozen=True)
class Plan:
    """How a model's layers become states: what each is made of, and what it may hold."""

    config: Any
    shapes: list[LayerShape | None]  # None: a linear-attention layer
    bounds: list[Bound | None]  # None: the layer grows
    setups: list[LayerSetup | None]
    fingerprint: dict[str, Any]
    last_position: int | None  # of a model that learned a row of a table for each position

    @property
    def backends(self) -> list[str]:
        return [setup.backend.name for setup in self.setups if setup]

    @property
    def repositioning(self) -> list[Repositioning | None]:
        """Where each layer's tokens are moved to; None: they stay where the model rotated them."""
        return [setup.repositioning if setup else None for setup in self.setups]

    @property
    def repositions(self) -> bool:
        """Whether some layer's keys are rotated anew, to other positions than the model gave them."""
        return any(self.repositioning)

    @property
    def decodes_repositioned(self) -> bool:
        """Whether blocks are read token by token, since the backend has no faster prefill for re-rotated keys."""
        return any(setup.repositioning and setup.backend.decodes_repositioned for setup in self.setups if setup)

    @property
    def hybrid(self) -> bool:
        """Whether some layers have linear attention, whose states transformers itself keeps."""
        return None in self.shapes

    def memory(self, layer: int, batch_size: int) -> Memory:
        shape, bound = self.shapes[layer], self.bounds[layer]
        assert shape is not None
        return Growing(batch_size, shape) if bound is None else Slots(batch_size, shape, bound)

    def nbytes(self, batch_size: int) -> int:
        """The bytes of a state's bounded layers, known before any is allocated."""
        pairs = zip(self.shapes, self.bounds, strict=True)
        return sum(Slots.nbytes_of(batch_size, shape, bound) for shape, bound in pairs if shape and bound)

    def check_memory(self, batch_size: int) -> None:
        """Refuse a state that does not fit into what is free, with what would."""
        devices = {shape.device for shape in self.shapes if shape}
        if len(devices) != 1 or batch_size < 1:
            return
        size, one = self.fingerprint["size"], self.nbytes(1)

        def mend(free: int) -> str:
            return f"{free // one:,} sequences fit" if free >= one else f"size {max(1, size * free // one):,} fits"

        what = f"a state of size {size} for {batch_size} sequence{'s' if batch_size > 1 else ''}"
        check_fits(self.nbytes(batch_size), next(iter(devices)), what, mend)

    def check_position(self, position: int) -> None:
        """Refuse a position that the model's table of learned positions does not have."""
        if self.last_position is not None and position > self.last_position:
            raise UsageError(
                f"position {position:,}: this model learned positions 0 to {self.last_position:,}, and knows no other"
            )

    def check_reach(self, columns: int) -> None:
        """Refuse columns that a caller's function of gaps does not reach on a GPU; replayed graphs check nothing."""
        for setup, bound in zip(self.setups, self.bounds, strict=True):
            if setup and bound and setup.repositioning:
                setup.backend.check_gaps(setup.repositioning.spacing, bound, columns)

    def state(self, batch_size: int) -> MultiState:
        self.check_memory(batch_size)
        linear = host_layers(self.config)
        layers = [
            LinearLayer(linear[i]) if shape is None else self.memory(i, batch_size)
            for i, shape in enumerate(self.shapes)
        ]
        return MultiState(layers, self.fingerprint)

    def cache(
        self,
        state: MultiState,
        columns: int = 0,
        record: Callable[[int], Record] | None = None,
        real: Tensor | None = None,
    ) -> Cache:
        """A state as a cache that says it has seen `columns` columns so far, whatever the state has.

        real [B, T] is False where the next columns are padding; without it, layers read the model's mask.
        """
        return OwnedCache(
            layers=[
                memory.layer
                if isinstance(memory, LinearLayer)
                else self.layer(i, memory, columns, record(i) if record else None, real)
                for i, memory in enumerate(state.layers)
            ]
        )

    def layer(
        self,
        i: int,
        memory: Memory | Callable[[int], Memory],
        columns: int = 0,
        record: Record | None = None,
        real: Tensor | None = None,
    ) -> StateLayer:
        setup = self.setups[i]
        assert setup is not None
        return StateLayer(setup, memory, columns, record, real)


def plan(
    model: PreTrainedModel,
    policy: str | Policy,
    size: int | None,
    chunk: int | None,
    backend: str,
    state_dtype: str | None,
    positions: str | Gap = ORIGINAL,
    driven: bool = False,
) -> Plan:
    """Check that a model can be bounded, hand its attention to msrnn, and learn its layers from one token.

    `driven` by msrnn, the model is read in blocks, and told where each new_position.
    """
    policy_, size = resolve(policy, size)
    code = parse_state_dtype(state_dtype)
    if code and policy_ is None:
        raise UsageError(f"state_dtype={state_dtype!r}: policy 'full' keeps states as they are; bound them, or drop it")
    if policy_ is None and (apart := spacing(positions)):
        raise UsageError(f"positions={apart.name!r}: policy 'full' leaves no gaps to close; bound it, or drop this")
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise UsageError(f"chunk={chunk!r}: must be a whole number of tokens, 1 or more")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{type(model).__name__} is not a transformers model: load one with AutoModelForCausalLM")
    if model.device.type == "meta":
        raise UsageError(f"{type(model).__name__} is on the meta device: load its weights first")
    config = model.config.get_text_config(decoder=True)
    apart = spacing(positions, _fitting(config, size) if positions == FITTED else 1)
    own = windows(model, config)
    with _handed_over(model, config):
        layers = inspect_layers(model, config)
        backends = [resolve_backend(backend, layer.shape.device if layer else model.device) for layer in layers]
        repositioning = _places(model, config, apart, len(layers))
        if driven:
            check_driven(model, config)
        if None in layers:
            check_split(model, config, driven)
        weights = fingerprint_of(model)
    dtypes = {str(layer.shape.dtype).removeprefix("torch.") for layer in layers if layer}
    fingerprint = {
        "policy": policy_.name if policy_ else FULL,
        "size": size,
        "dtype": state_dtype or "/".join(sorted(dtypes)),
        "positions": name_of(apart),
        "model": weights,
        "rotary": _digest(json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str).encode()),
        "windows": sorted({w for w in own if w is not None}),
    }
    shapes = [layer and replace(layer.shape, state_dtype=code) for layer in layers]
    bounds = [layer_bound(policy_, size, window) for window in own]
    setups = [
        layer
        and LayerSetup(
            config,
            weakref.ref(layer.module),
            chunk or backends[i].default_chunk,
            backends[i],
            repositioning[i],
            own[i],
            layer.hands_on,
        )
        for i, layer in enumerate(layers)
    ]
    return Plan(config, shapes, bounds, setups, fingerprint, last_position(model, config))


@contextmanager
def _handed_over(model: PreTrainedModel, config: Any) -> Iterator[None]:
    """The model in evaluation mode, its attention msrnn's; as it was before, should anything fail meanwhile."""
    before, training = config._attn_implementation, [module for module in model.modules() if module.training]
    try:
        model.eval()
        model.set_attn_implementation(NAME)
        yield
    except BaseException:
        model.set_attn_implementation(before)
        for module in training:
            module.training = True
        raise


def windows(model: PreTrainedModel, config: Any) -> list[int | None]:
    """Each layer's own sliding window; refuses, with the reason, what cannot be bounded."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UsageError(f"{name} is an encoder-decoder: msrnn bounds decoders, whose states grow with the text")
    if getattr(config, "num_kv_shared_layers", None):
        raise UsageError(f"{name} has layers that read the states of others: they cannot forget on their own")
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


def _fitting(config: Any, size: int | None) -> int:
    """How far apart neighbours may stand, so that `size` tokens and one never take more room than the model has."""
    length: int | None = getattr(config, "max_position_embeddings", None)
    if not length or size is None:
        reason = "this model does not say for what length it was made; name a largest gap, as in 'compressed:16'"
        raise UsageError(f"positions={FITTED!r}: {reason}")
    if size >= length:
        reason = f"size={size} leaves no gap to close in the {length:,} positions of this model; take a smaller size"
        raise UsageError(f"positions={FITTED!r}: {reason}")
    return (length - 1) // size


def _places(model: PreTrainedModel, config: Any, apart: Spacing | None, layers: int) -> list[Repositioning | None]:
    if apart is None:
        return [None] * layers
    return [Repositioning(apart, rope) if rope else None for rope in learn(model, config)]


def fingerprint_of(model: PreTrainedModel) -> str:
    """Tells models apart by their weights: names, shapes and 16 values of each, as they are when the model is wrapped.

    Not noticed: a change to other values than those sampled, training after wrapping, adapters that are switched off.
    Quantized weights that are no tensors count by their name and type, weights on the meta device (offloaded to disk)
    by their shape.
    """
    told = []
    for name, weight in model.state_dict().items():
        if not isinstance(weight, Tensor):
            told.append(f"{name}{type(weight).__name__}".encode())
            continue
        sample = b""
        if weight.device.type != "meta":
            flat = weight.detach().flatten()
            flat = flat.dequantize() if flat.is_quantized else flat
            sample = flat[:: max(1, flat.numel() // 16)].float().cpu().numpy().tobytes()
        told.append(f"{name}{list(weight.shape)}".encode() + sample)
    return _digest(b"".join(told))


def _digest(told: bytes) -> str:
    return hashlib.sha256(told).hexdigest()[:16]


class MultiStateCache(OwnedCache):
    """A bounded state for those who call `model.generate` or `model.forward` themselves.

    The model is put into evaluation mode and its attention is handed to msrnn, as by `MultiStateRNN`. Positions are the
    model's own: after the last of a table of learned positions (GPT-2), it raises its own IndexError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy = "tova",
        size: int | None = 512,
        *,
        chunk: int | None = None,
        backend: str = "auto",
        state_dtype: str | None = None,
        positions: str | Gap = ORIGINAL,
    ) -> None:
        for name in ("config", "generation_config"):
            if getattr(getattr(model, name, None), "use_cache", None) is False:
                raise UsageError(
                    f"model.{name}.use_cache=False makes generate read the whole text again at every step, which a "
                    f"state that evicts cannot undo: set model.{name}.use_cache = True"
                )
        self.plan = plan(model, policy, size, chunk, backend, state_dtype, positions)
        host = host_layers(self.plan.config)
        super().__init__(
            layers=[
                host[i] if shape is None else self.plan.layer(i, partial(self._memory, i))
                for i, shape in enumerate(self.plan.shapes)
            ]
        )

    def _memory(self, layer: int, batch_size: int) -> Memory:
        if not any(isinstance(other, StateLayer) and isinstance(other.memory, Memory) for other in self.layers):
            self.plan.check_memory(batch_size)
        return self.plan.memory(layer, batch_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiStateCache:
        """A copy of the states, for the same model."""
        other = copy.copy(self)
        other.layers = copy.deepcopy(self.layers, memo)
        return other

    @property
    def state(self) -> MultiState:
        """What the cache holds, as a state to save, fork or go on from."""
        layers = [layer.memory if isinstance(layer, StateLayer) else LinearLayer(layer) for layer in self.layers]
        if not all(isinstance(layer, Memory | LinearLayer) for layer in layers):
            raise UsageError("this cache has read nothing yet, so it holds no state")
        whole = not any(isinstance(layer, StateLayer) and layer.unfinished for layer in self.layers)
        return MultiState(layers, self.plan.fingerprint, whole)
