"""Forward passes as CUDA graphs: the buffers of a bounded state have one shape, so a captured graph fits any length.

One graph per batch size and width (1 for a decode step, a block for prefill). The graphs of a batch size share one set
of buffers, which belongs to one state at a time. When another state is read, it gets them, and the first gets a copy.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.slots import ordinary_tensors
from msrnn.core.state import MultiState
from msrnn.hf.state_spec import StateSpec


class Graph:
    """A forward pass over [B, T] ids, captured on the buffers that a state has now."""

    def __init__(
        self, model: PreTrainedModel, spec: StateSpec, state: MultiState, width: int, last_only: bool, compiles: bool
    ):
        B, device = state.batch_size, model.device
        self.ids = torch.zeros(B, width, dtype=torch.long, device=device)
        # Warm-up and capture read padding only, which does not change the state.
        self.real = torch.zeros(B, width, dtype=torch.bool, device=device)
        self.graph = torch.cuda.CUDAGraph()
        forward: Any = torch.compile(model) if compiles else model

        def read(rows: slice) -> Tensor:
            part, real = state._part(rows), self.real[rows]
            logits: Tensor = forward(
                input_ids=self.ids[rows],
                # A mask of four dimensions is not inspected: reading it back would break the capture.
                attention_mask=real[:, None, None].expand(-1, 1, width, -1),
                position_ids=(part.seen[:, None] + real.cumsum(-1) - 1).clamp(min=0),
                past_key_values=spec.cache(part, real=real),
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
            ).logits
            return logits

        # While the scan of one half uses a few multiprocessors, the matrix products of the other half use the rest.
        halves = [slice(0, B)] if width == 1 or B == 1 else [slice(0, B // 2), slice(B // 2, B)]
        with torch.cuda.device(device), _unspecialized() if compiles else nullcontext():
            _on_streams(read, halves, times=2)
            with torch.cuda.graph(self.graph):
                self.logits = torch.cat(_on_streams(read, halves))
        self.real.fill_(True)
        self._masked = False

    def __call__(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """ids [B, T] and a mask of the same shape, or none -> logits, which the next call overwrites."""
        self.ids.copy_(input_ids)
        if mask is not None:
            self.real.copy_(mask)
            self._masked = True
        elif self._masked:
            self.real.fill_(True)
            self._masked = False
        self.graph.replay()
        return self.logits


def _on_streams(read: Any, parts: list[slice], times: int = 1) -> list[Tensor]:
    """Each part on its own stream; the current stream waits for all."""
    current = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in parts]
    results = []
    for stream, rows in zip(streams, parts, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(times):
                result = read(rows)
            results.append(result)
    for stream in streams:
        current.wait_stream(stream)
    return results


def _chain(error: BaseException) -> list[BaseException]:
    """An error and its contexts, the original error last: an aborted capture raises a second error."""
    return [error, *_chain(error.__context__)] if error.__context__ is not None else [error]


def _unspecialized() -> Any:
    """torch.compile treats a layer's index as a variable, so that layers of one kind share their compiled code."""
    return torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)


class _GraphBuffers:
    """The buffers of one batch size, the graphs captured on them, and the state that owns them now, if any."""

    def __init__(self, state: MultiState) -> None:
        self.layers = [copy.copy(layer) for layer in state.layers]
        self.graphs: dict[tuple[int, bool], Graph | None] = {}
        self.owner = weakref.ref(state)

    @ordinary_tensors
    def assign(self, state: MultiState) -> None:
        """Copy a state into these buffers, which are then its own. The state that had them before gets a copy."""
        before = self.owner()
        if before is state:
            return
        for i, layer in enumerate(self.layers):
            for name, buffer in layer.tensors().items():
                if before is not None:
                    setattr(before.layers[i], name, buffer.clone())
                buffer.copy_(getattr(state.layers[i], name))
                setattr(state.layers[i], name, buffer)
        self.owner = weakref.ref(state)

    def empty_state(self, fingerprint: dict[str, Any]) -> MultiState:
        """An empty state in buffers that no state uses any more."""
        state = MultiState([copy.copy(layer) for layer in self.layers], fingerprint)
        state.reset()
        self.owner = weakref.ref(state)
        return state


class Graphs:
    """The captured graphs of one model under one spec."""

    def __init__(self, model: PreTrainedModel, spec: StateSpec, compiles: bool) -> None:
        self.model, self.spec, self.compiles = model, spec, compiles
        fixed = all(bound and shape for bound, shape in zip(spec.bounds, spec.shapes, strict=True))
        devices = {shape.device for shape in spec.shapes if shape}
        on_cuda = model.device.type == "cuda" and len(devices) == 1
        self.possible = fixed and on_cuda and set(spec.backends) == {"triton"}
        self._buffers: dict[int, _GraphBuffers] = {}
        weights = [*model.parameters()]
        self._ends = weights[:1] + weights[-1:]  # enough to notice a move or a cast, which changes all weights
        self._weights = self._addresses()
        self._requests: Counter[tuple[int, int, bool]] = Counter()

    def of(self, state: MultiState, width: int = 1, last_only: bool = True, after: int = 0) -> Graph | None:
        """The graph for a state, captured after more than `after` requests; None where there is none.

        A model that cannot be captured gives a warning.
        """
        if not self.possible:
            return None
        self._forget_moved_weights()
        self._requests[state.batch_size, width, last_only] += 1
        if self._requests[state.batch_size, width, last_only] <= after:
            return None
        buffers = self._buffers.get(state.batch_size)
        if buffers is None:
            buffers = self._buffers[state.batch_size] = _GraphBuffers(state)
        buffers.assign(state)
        key = width, last_only
        if key not in buffers.graphs:
            buffers.graphs[key] = self._capture(state, width, last_only)
        return buffers.graphs[key]

    def state(self, batch_size: int) -> MultiState:
        """An empty state, in the buffers of an earlier one if they are free; other free buffers are released."""
        buffers = self._buffers.get(batch_size)
        if buffers is not None and buffers.owner() is None:
            return buffers.empty_state(self.spec.fingerprint)
        self.release()
        return self.spec.state(batch_size)

    def _addresses(self) -> tuple[int, ...]:
        return tuple(weight.data_ptr() for weight in self._ends)

    def _forget_moved_weights(self) -> None:
        """Drop graphs when weights have moved: a graph reads them at their old addresses."""
        if self._weights != (addresses := self._addresses()):
            self._weights = addresses
            for buffers in self._buffers.values():
                buffers.graphs.clear()

    def release(self) -> None:
        """Free the graphs and buffers that no state uses."""
        self._buffers = {size: buffers for size, buffers in self._buffers.items() if buffers.owner() is not None}

    def _capture(self, state: MultiState, width: int, last_only: bool) -> Graph | None:
        columns = [layer.columns for layer in state.layers]
        try:
            return Graph(self.model, self.spec, state, width, last_only, self.compiles)
        except RuntimeError as error:
            errors = _chain(error)
            if any(isinstance(e, torch.OutOfMemoryError) for e in errors):
                raise
            reason = (str(errors[-1]) or type(errors[-1]).__name__).splitlines()[0]
            warnings.warn(
                f"this model cannot be captured as a CUDA graph, so its kernels are launched one by one ({reason})",
                stacklevel=4,
            )
            return None
        finally:
            for layer, count in zip(state.layers, columns, strict=True):
                layer.columns = count  # the warm-up has read no token
