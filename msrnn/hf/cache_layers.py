"""Cache layers for transformers: one layer of a bounded state, and a linear-attention layer."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from msrnn.backends.base import Backend
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.rope import Repositioning
from msrnn.core.scores import Scoring
from msrnn.core.slots import Growing, Memory, Slots
from msrnn.errors import UsageError
from msrnn.hf.cache_state import CachedState
from msrnn.layer import Record, attend, attend_unbounded
from msrnn.recall_layer import attend_recalling

NAME = "msrnn"  # of the attention implementation
READS_AGAIN = (
    "makes generate read the whole text again at every step, which a state that evicts cannot undo: "
    "pass use_cache=True, or set it in the model's config and generation_config"
)


class OwnedLayer(CacheLayerMixin):
    """A cache layer that the attention function finds on its keys.

    It reports the columns that were read before the forward pass in flight, to every layer the same number.
    """

    is_compileable = False
    is_sliding = False
    supports_early_init = False
    window: int | None = None  # the layer's sliding window, the query's own token included
    real: Tensor | None = None  # [B, T], False where padding, if the caller knows; otherwise the mask decides

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.waiting = False  # `update` returned keys, and the attention function has not taken them yet

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        active = self.config._attn_implementation
        if active != NAME:
            raise UsageError(
                f"the model's attention is now {active!r}, which cannot read a bounded state: wrap the model again"
            )
        self.lazy_initialization(key_states, value_states)
        self.waiting = True
        key_states.owner = self  # type: ignore[attr-defined]
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def check_call(self, module: nn.Module, use_cache: bool | None) -> None:
        """Refuse a call by another attention module, or without a cache."""

    def check_goes_on(self, position_ids: Tensor, real: Tensor | None) -> None:
        """Refuse tokens whose positions cannot follow what the layer has read."""

    def check_ends(self, real: Tensor, mask: Any) -> None:
        """Refuse sequences that end with padding; `real` is that of the `mask`."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scoring: Scoring) -> Tensor:
        """Append, attend, observe, evict: [B, T, H, Dv]; real [B, T] is False where padding."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.get_seq_length()

    def get_max_length(self) -> int:
        return -1


class OwnedCache(Cache):
    """A cache of `OwnedLayer`s. torch.compile skips it, as it skips the attention function."""

    _last: int | None = None  # the layer that was updated last

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        before = self.layers[self._last] if self._last is not None else None
        # If our attention function did not take the keys, another one did, and saw the new tokens only.
        if isinstance(before, OwnedLayer) and before.waiting:
            raise UsageError(
                f"the model that was given this cache does not read its state: its attention is not {NAME!r}; "
                "make a MultiStateCache for that model"
            )
        self._last = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class LayerSetup:
    """The inputs that one layer needs to attend to its KV rows."""

    config: Any  # of the decoder; it names the active attention implementation
    module: Callable[[], nn.Module | None]  # a weak reference to the layer's attention module
    chunk: int
    backend: Backend
    repositioning: Repositioning | None
    window: int | None  # the layer's sliding window
    passes_use_cache: bool  # whether `use_cache` of the model's call reaches the attention function


class Place(NamedTuple):
    """Where a block of a text stands, if the caller has computed that for all layers."""

    position: Tensor  # [B, T] int32, -1 where padding; counted already
    turn: AbstractContextManager[None]  # around the layer's work on its slots


class StateLayer(OwnedLayer):
    """One layer of a state as a transformers cache layer."""

    def __init__(
        self,
        setup: LayerSetup,
        index: int,
        cached: CachedState,
        record: Record | None = None,
        real: Tensor | None = None,
        place: Place | None = None,
    ) -> None:
        super().__init__(setup.config)
        self.setup, self.index, self.cached, self.record, self.real = setup, index, cached, record, real
        self.place = place
        self.window = setup.window

    @property
    def memory(self) -> Memory:
        memory: Memory = self.cached.state.layers[self.index]
        return memory

    def __deepcopy__(self, memo: dict[int, Any]) -> StateLayer:
        """A copy of the state, for the same model."""
        cached = copy.deepcopy(self.cached, memo)
        other = StateLayer(self.setup, self.index, cached, self.record, self.real, self.place)
        other.waiting, other.is_initialized = self.waiting, self.is_initialized
        return other

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cached.prepare(key_states.shape[0])
        super().lazy_initialization(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.cached.columns

    def check_call(self, module: nn.Module, use_cache: bool | None) -> None:
        if self.setup.passes_use_cache and use_cache is False:
            raise UsageError(f"use_cache=False {READS_AGAIN}")
        if module is not self.setup.module():
            raise UsageError(
                f"this cache was made for another model than the one whose {type(module).__name__} reads it: "
                "make a MultiStateCache for each model"
            )

    def check_goes_on(self, position_ids: Tensor, real: Tensor | None) -> None:
        """Refuse tokens that start at position 0 again; position_ids [..., B, T].

        With `use_cache=False`, generate reads the whole text at every step, and not every model passes `use_cache` on.
        """
        first, follows = position_ids[..., 0], self.memory.seen > 0
        if real is not None:
            position_ids = position_ids.expand(*position_ids.shape[:-2], *real.shape)
            columns = real.int().argmax(-1, keepdim=True).expand(*position_ids.shape[:-1], 1)
            first, follows = position_ids.gather(-1, columns)[..., 0], follows & real.any(-1)
        if bool(((first == 0) & follows).any()):
            raise UsageError(f"position 0 again after other tokens: use_cache=False {READS_AGAIN}")

    def check_ends(self, real: Tensor, mask: Any) -> None:
        """Refuse padding after a token: callers of the model continue a sequence from its last column.

        One mask serves all layers, and is checked by the first.
        """
        if getattr(mask, "ends_checked", None) == self.cached.columns:
            return
        wrong = ~real[:, -1] & (real.any(-1) | (self.memory.seen > 0))
        if bool(wrong.any()):
            raise UsageError(
                f"attention_mask: sequence {int(wrong.nonzero()[0])} ends with padding, and the model continues from "
                "the last column; pad on the left (tokenizer.padding_side = 'left'), or use MultiStateRNN.read"
            )
        mask.ends_checked = self.cached.columns

    def attend(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scoring: Scoring) -> Tensor:
        memory = self.memory
        if query.shape[0] != memory.batch_size:
            raise UsageError(
                f"a batch of {query.shape[0]} does not fit a state of {memory.batch_size}: use the same batch size"
            )
        if key.dtype != memory.dtype:
            raise UsageError(
                f"keys of {key.dtype} do not fit a state of {memory.dtype}: leave autocast, or cast the model "
                "first and wrap it again"
            )
        if scoring.sinks is not None and scoring.sinks.shape[0] != query.shape[1]:
            raise UsageError(
                f"{scoring.sinks.shape[0]} attention sinks for the {query.shape[1]} heads of this process: msrnn does "
                "not support a model with sinks that processes share; load it in one process"
            )
        with self.cached.reading(self.index, query.shape[2]):
            if isinstance(memory, Growing):
                return attend_unbounded(memory, self.cached.state.columns, query, key, value, real, scoring)
            return self._attend_bounded(memory, query, key, value, real, scoring)

    def _attend_bounded(
        self, slots: Slots, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scoring: Scoring
    ) -> Tensor:
        setup = self.setup
        if setup.repositioning is not None:
            scoring = replace(scoring, repositioning=setup.repositioning)
        with torch.cuda.device_of(query):  # kernels are launched on the current device
            place = self.place or Place(slots.advance(query.shape[2], real), nullcontext())
            rest: Any = scoring, setup.chunk, setup.backend, self.record
            with place.turn:
                if isinstance(slots, RecallSlots):
                    rest = *rest, real, self.cached.recalling
                    return attend_recalling(slots, query, key, value, place.position, *rest)
                mark = self.cached.state.marked
                if mark is None:
                    return attend(slots, query, key, value, place.position, *rest)
                if self.record is not None:
                    raise UsageError("eviction times of tokens that may be taken back: unmark() the state first")

                def attend_to(columns: slice, position: Tensor) -> Tensor:
                    return attend(
                        slots, query[:, :, columns], key[:, :, columns], value[:, :, columns], position, *rest
                    )

                return mark.attend(self.index, slots, place.position, attend_to)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: the layers of a state take tokens back together."""
        raise UsageError("a layer alone cannot take tokens back: crop() the cache")

    def reset(self) -> None:
        """Make the whole state empty: layers have read the same columns."""
        self.waiting = False
        self.cached.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cached.exists:
            self.cached.state.unmark()
            self.memory.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cached.exists:
            self.cached.state.unmark()
            self.cached.state.layers[self.index] = self.memory.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cached.exists:
            self.batch_select_indices(torch.arange(self.memory.batch_size).repeat_interleave(repeats))

    def offload(self) -> None:
        raise UsageError("a bounded state stays on its device: it is small, do not offload it")


class LinearLayer:
    """The cache of a linear-attention layer, whose size is fixed already, as a part of a `MultiState`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def nbytes(self) -> int:
        states = [*self.layer.conv_states.values(), *self.layer.recurrent_states.values()]
        return sum(state.nbytes for state in states if state is not None)

    def reset(self) -> None:
        self.layer.reset()

    def select(self, sequences: Tensor) -> LinearLayer:
        other = copy.deepcopy(self.layer)
        other.reorder_cache(sequences)
        return LinearLayer(other)
