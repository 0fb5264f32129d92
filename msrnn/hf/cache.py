"""MultiStateCache: a bounded state for `model.generate(past_key_values=...)`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from msrnn.core.rope import ORIGINAL, Gap
from msrnn.core.slots import Memory
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.cache_layers import LinearLayer, OwnedCache, StateLayer
from msrnn.hf.inspect import hand_over
from msrnn.hf.inspect_layers import host_layers
from msrnn.hf.state_spec import StateSpec, state_spec
from msrnn.policy import Policy


class MultiStateCache(OwnedCache):
    """A bounded state as a transformers cache, for callers of `model.generate` or `model.forward`.

    The options are those of `MultiStateRNN`, and the model is changed in the same way. Position ids are the model's
    own: past the end of a table of learned positions (GPT-2), it raises its own IndexError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy = "tova",
        size: int | None = 512,
        *,
        positions: str | Gap = ORIGINAL,
        state_dtype: str | torch.dtype | None = None,
        backend: str = "auto",
        chunk: int | None = None,
    ) -> None:
        options: Any = {"positions": positions, "state_dtype": state_dtype, "backend": backend, "chunk": chunk}
        spec = state_spec(model, policy, size, **options)
        hand_over(model, self)
        self._build(model, spec)

    @classmethod
    def from_spec(cls, model: PreTrainedModel, spec: StateSpec) -> MultiStateCache:
        """A cache for a model whose attention is msrnn's already."""
        cache = cls.__new__(cls)
        cache._build(model, spec)
        return cache

    def _build(self, model: PreTrainedModel, spec: StateSpec) -> None:
        for name in ("config", "generation_config"):
            if getattr(getattr(model, name, None), "use_cache", None) is False:
                raise UsageError(
                    f"model.{name}.use_cache=False makes generate read the whole text again at every step, which a "
                    f"state that evicts cannot undo: set model.{name}.use_cache = True"
                )
        self.spec = spec
        host = host_layers(spec.model.config)
        super().__init__(
            layers=[
                host[i] if shape is None else self.spec.layer(i, partial(self._memory, i))
                for i, shape in enumerate(self.spec.shapes)
            ]
        )

    def _memory(self, layer: int, batch_size: int) -> Memory:
        if not any(isinstance(other, StateLayer) and isinstance(other.memory, Memory) for other in self.layers):
            self.spec.check_memory(batch_size)
        return self.spec.memory(layer, batch_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiStateCache:
        """A copy of the states, for the same model."""
        other = copy.copy(self)
        other.layers = copy.deepcopy(self.layers, memo)
        return other

    @property
    def state(self) -> MultiState:
        """The state that the cache holds, to save, fork or continue from."""
        layers = [layer.memory if isinstance(layer, StateLayer) else LinearLayer(layer) for layer in self.layers]
        if not all(isinstance(layer, Memory | LinearLayer) for layer in layers):
            raise UsageError("this cache has read nothing yet, and so holds no state: read a token first")
        whole = not any(isinstance(layer, StateLayer) and layer.unfinished for layer in self.layers)
        return MultiState(layers, self.spec.fingerprint, whole)
