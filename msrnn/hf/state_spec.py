"""StateSpec: the layout of the states of one model under one policy and size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from msrnn.bound import Bound
from msrnn.core.device_memory import check_fits
from msrnn.core.fingerprint import ARCHITECTURE, WEIGHTS
from msrnn.core.own_sizes import check_own_size, lower_bound
from msrnn.core.protection import add_ranges, no_ranges
from msrnn.core.protection import check_fits as check_protected_fit
from msrnn.core.recall_slots import archive_layout
from msrnn.core.rope import Repositioning
from msrnn.core.segments import ArchiveLayout
from msrnn.core.slots import MOST_COLUMNS, Growing, LayerShape, Memory
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.cache_layers import LayerSetup, LinearLayer, OwnedCache, Place, StateLayer
from msrnn.hf.cache_state import CachedState
from msrnn.hf.inspect import ModelSpec
from msrnn.hf.inspect_layers import host_layers
from msrnn.hf.recall_options import (
    check_archive,
    slots_class,
)
from msrnn.layer import Record
from msrnn.recall import Recall, Recalling
from msrnn.size import find_budget_layers


@dataclass(frozen=True)
class StateSpec:
    """The layout of a state: a model's layers under a policy and size. Makes empty states, and caches over states."""

    model: ModelSpec
    shapes: list[LayerShape | None]  # None: a linear-attention layer
    bounds: list[Bound | None]  # None: the layer is not bounded
    setups: list[LayerSetup | None]
    fingerprint: dict[str, Any]  # a state must have the same one to fit

    @property
    def summary(self) -> str:
        """The model and the options, for a repr."""
        names = [name for name in ("policy", WEIGHTS, "size", "dtype", "positions") if name in self.fingerprint]
        shown = ", ".join(f"{name}={self.fingerprint[name]!r}" for name in names)
        return f"{self.fingerprint[ARCHITECTURE]}, {shown}"

    @property
    def backends(self) -> list[str]:
        return [setup.backend.name for setup in self.setups if setup]

    @property
    def repositioning(self) -> list[Repositioning | None]:
        """The re-rotation of each layer's keys; None: they stay as the model rotated them."""
        return [setup.repositioning if setup else None for setup in self.setups]

    @property
    def repositions(self) -> bool:
        """Whether the keys of some layer are re-rotated."""
        return any(self.repositioning)

    @property
    def decodes_repositioned(self) -> bool:
        """Whether blocks are read token by token, since the backend has no faster prefill for re-rotated keys."""
        return any(setup.repositioning and setup.backend.decodes_repositioned for setup in self.setups if setup)

    @property
    def recall(self) -> Recall | None:
        """What the layers with an archive recall; None: nothing is archived."""
        return next((bound.recall for bound in self.bounds if bound and bound.recall), None)

    @property
    def paged(self) -> bool:
        """Whether kernels read and write all archives."""
        pairs = zip(self.shapes, self.bounds, strict=True)
        return all(shape.paged for shape, bound in pairs if shape and bound and bound.recall)

    @property
    def recalling(self) -> Recalling | None:
        """When decode steps recall; None: nothing is archived."""
        return Recalling(self.recall.every, starts=False) if self.recall else None

    @property
    def hybrid(self) -> bool:
        """Whether some layers have linear attention, whose states transformers itself keeps."""
        return None in self.shapes

    @property
    def divided(self) -> list[int]:
        """The layers that a budget is divided among."""
        return find_budget_layers(self.model.windows, [shape is None for shape in self.shapes])

    @property
    def sizes(self) -> list[int | None]:
        """The KV rows that each layer may hold; None: the layer is not bounded."""
        return [bound.size if bound else None for bound in self.bounds]

    @property
    def mean_size(self) -> int:
        """The KV rows of the layers that a budget would be divided among, on average, rounded down."""
        sizes = [size for size in map(self.sizes.__getitem__, self.divided) if size is not None]
        return sum(sizes) // len(sizes) if sizes else 0

    def memory(self, layer: int, batch_size: int) -> Memory:
        shape, bound = self.shapes[layer], self.bounds[layer]
        assert shape is not None
        if bound is None:
            return Growing(batch_size, shape)
        return slots_class(shape, bound)(batch_size, shape, bound)

    @property
    def archived_row_nbytes(self) -> int:
        """The bytes by which the archive of a sequence grows with each token, in all layers."""
        return sum(layout.row_bytes for layout in self._archives)

    @property
    def index_row_nbytes(self) -> int:
        """The bytes of 8-bit copies of keys on the device that come with each archived token, in all layers."""
        return sum(layout.index_row_bytes for layout in self._archives)

    @property
    def _archives(self) -> list[ArchiveLayout]:
        """The archives of the layers that have one."""
        pairs = zip(self.shapes, self.bounds, strict=True)
        found = ((shape, bound.recall) for shape, bound in pairs if shape and bound)
        return [archive_layout(shape, recall) for shape, recall in found if recall]

    @property
    def archived_tokens(self) -> int | None:
        """The most tokens in the archive of a sequence; None: it has all that were read."""
        return next((shape.archived for shape in self.shapes if shape and shape.archived is not None), None)

    def nbytes(self, batch_size: int) -> int:
        """The bytes of a state's bounded layers, computed without allocating any."""
        pairs = zip(self.shapes, self.bounds, strict=True)
        return sum(
            slots_class(shape, bound).nbytes_of(batch_size, shape, bound) for shape, bound in pairs if shape and bound
        )

    def check_memory(self, batch_size: int) -> None:
        """Refuse a state that does not fit into the free memory; the message says what would fit."""
        devices = {shape.device for shape in self.shapes if shape}
        if len(devices) != 1 or batch_size < 1:
            return
        size, one = self.mean_size, self.nbytes(1)

        def advice(free: int) -> str:
            return f"{free // one:,} sequences fit" if free >= one else f"size {max(1, size * free // one):,} fits"

        what = f"a state of size {size} for {batch_size} sequence{'s' if batch_size > 1 else ''}"
        check_fits(self.nbytes(batch_size), next(iter(devices)), what, advice)

    def check_position(self, position: int) -> None:
        """Refuse a position beyond the model's table of learned positions."""
        last = self.model.last_position
        if last is not None and position > last:
            message = f"position {position:,}: this model has learned positions 0 to {last:,} only"
            raise UsageError(message, advice="read a shorter text")

    def check_device(self, state: MultiState) -> None:
        """Refuse a state on another device than the layers that read it."""
        for shape, layer in zip(self.shapes, state.layers, strict=True):
            if shape and layer.seen.device != shape.device:
                raise UsageError(f"a state on {layer.seen.device}: the model is on {shape.device}; use state.to(...)")

    def check_archives(self, state: MultiState) -> None:
        """Refuse a state whose archives are searched in another way than this RNN searches, or have another limit."""
        for shape, bound, layer in zip(self.shapes, self.bounds, state.layers, strict=True):
            if shape and bound and bound.recall:
                check_archive(layer, shape, bound)

    def check_autocast(self) -> None:
        """Refuse autocast to another dtype than that of the states."""
        for shape in filter(None, self.shapes):
            kind = shape.device.type
            computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else shape.dtype
            if computed != shape.dtype:
                raise UsageError(
                    f"autocast computes in {computed}, and states are kept in {shape.dtype}: leave autocast, or cast "
                    "the model before it is wrapped"
                )

    def check_gaps(self, columns: int) -> None:
        """Refuse texts whose gaps a backend cannot compute; a replayed CUDA graph could not check it."""
        for setup, bound in zip(self.setups, self.bounds, strict=True):
            if setup and bound and setup.repositioning:
                setup.backend.check_gaps(setup.repositioning.spacing, bound, columns)

    def check_size(self, size: int) -> None:
        """Refuse a size of their own that sequences cannot have."""
        pairs = zip(self.shapes, self.bounds, strict=True)
        check_own_size([bound for shape, bound in pairs if shape is not None], size)
        if self.recall is not None and self.repositions:
            reason = (
                "where keys are re-rotated, recalled rows stand at a distance that depends on the size of the model"
            )
            raise UsageError(reason, name="size", value=size, advice="leave it out, or use no recall")

    def check_protect(self, tokens: int = 0, size: int | None = None) -> None:
        """Refuse to protect this many tokens of an empty state, and gaps to them that a backend cannot compute.

        `size`: of the sequence, if it has one of its own.
        """
        bounds = [bound if size is None else lower_bound(bound, size) for bound in self.bounds if bound is not None]
        count = torch.tensor([tokens])
        check_protected_fit(add_ranges(no_ranges(1, count.device), torch.zeros_like(count), count), bounds, count)
        for setup, bound in zip(self.setups, self.bounds, strict=True):
            if setup and bound and setup.repositioning and bound.window and not bound.sliding:
                kept = replace(bound, policy=replace(bound.policy, first=max(1, bound.policy.first)))
                setup.backend.check_gaps(setup.repositioning.spacing, kept, MOST_COLUMNS)

    def state(self, batch_size: int, host: Sequence[Any] | None = None) -> MultiState:
        """An empty state; `host` has at their indices the cache layers that linear attention shall use."""
        self.check_memory(batch_size)
        host = host or host_layers(self.model.config)
        layers = [
            LinearLayer(host[i]) if shape is None else self.memory(i, batch_size) for i, shape in enumerate(self.shapes)
        ]
        return MultiState(layers, self.fingerprint, columns=0)

    def cache(
        self,
        cached: CachedState,
        record: Callable[[int], Record] | None = None,
        real: Tensor | None = None,
        places: Sequence[Place] | None = None,
    ) -> Cache:
        """A cache over a state. The caller counts the columns of the state.

        real [B, T] is False where the next columns are padding; without it, layers take that from the model's mask.
        `places` holds for each layer what the caller has computed for all of them.
        """
        return OwnedCache(
            layers=[
                memory.layer
                if isinstance(memory, LinearLayer)
                else self.layer(i, cached, record(i) if record else None, real, places[i] if places else None)
                for i, memory in enumerate(cached.state.layers)
            ]
        )

    def layer(
        self,
        i: int,
        cached: CachedState,
        record: Record | None = None,
        real: Tensor | None = None,
        place: Place | None = None,
    ) -> StateLayer:
        setup = self.setups[i]
        assert setup is not None
        return StateLayer(setup, i, cached, record, real, place)
