"""Forward passes as CUDA graphs: a bounded state has one shape, so what was captured once replays for ever.

One graph per batch size and width (1 for a step, a block for reading). The graphs of a batch size live on one set of
buffers, in which one state at a time is at home; another moves in when its turn comes, or when the first is gone.
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
from msrnn.hf.state_spec import Plan


class Graph:
    """A forward pass over [B, T] ids, captured on the buffers that a state has now."""

    def __init__(
        self, model: PreTrainedModel, plan: Plan, state: MultiState, width: int, last_only: bool, compiles: bool
    ):
        B, device = state.batch_size, model.device
        self.ids = torch.zeros(B, width, dtype=torch.long, device=device)
        # What the mask hides is padding, and padding leaves a state untouched: so does warming up with nothing else.
        self.real = torch.zeros(B, width, dtype=torch.bool, device=device)
        self.graph = torch.cuda.CUDAGraph()
        forward: Any = torch.compile(model) if compiles else model

        def read(rows: slice) -> Tensor:
            part, real = state.part(rows), self.real[rows]
            logits: Tensor = forward(
                input_ids=self.ids[rows],
                # In four dimensions, a mask is not looked at: reading it back would break the capture.
                attention_mask=real[:, None, None].expand(-1, 1, width, -1),
                position_ids=(part.seen[:, None] + real.cumsum(-1) - 1).clamp(min=0),
                past_key_values=plan.cache(part, real=real),
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
            ).logits
            return logits

        # While one half's scan walks on a few multiprocessors, the other half's matrix products have the rest.
        halves = [slice(0, B)] if width == 1 or B == 1 else [slice(0, B // 2), slice(B // 2, B)]
        with torch.cuda.device(device), _unspecialized() if compiles else nullcontext():
            _on_streams(read, halves, times=2)
            with torch.cuda.graph(self.graph):
                self.logits = torch.cat(_on_streams(read, halves))
        self.real.fill_(True)

    def __call__(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T], and a mask of the same shape or none -> logits, overwritten by the next call."""
        self.ids.copy_(input_ids)
        if self.ids.shape[1] > 1:
            self.real.copy_(mask) if mask is not None else self.real.fill_(True)
        self.graph.replay()
        return self.logits


def _on_streams(read: Any, parts: list[slice], times: int = 1) -> list[Tensor]:
    """Each part on a stream of its own; the current one waits for all."""
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
    """Back to the first that went wrong: a capture that is given up complains again, of what was left behind."""
    return [error, *_chain(error.__context__)] if error.__context__ is not None else [error]


def _unspecialized() -> Any:
    """A layer's index is a number like any other: layers of one kind share what was compiled for the first."""
    return torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)


class _Home:
    """The buffers of one batch size, the graphs captured on them, and the state that lives there, if one does."""

    def __init__(self, state: MultiState) -> None:
        self.layers = [copy.copy(layer) for layer in state.layers]
        self.graphs: dict[tuple[int, bool], Graph | None] = {}
        self.resident = weakref.ref(state)

    @ordinary_tensors
    def admit(self, state: MultiState) -> None:
        """A state moves in: its values into these buffers, which are then its own. Whoever was here takes a copy."""
        before = self.resident()
        if before is state:
            return
        for i, home in enumerate(self.layers):
            for name, buffer in home.tensors().items():
                if before is not None:
                    setattr(before.layers[i], name, buffer.clone())
                buffer.copy_(getattr(state.layers[i], name))
                setattr(state.layers[i], name, buffer)
        self.resident = weakref.ref(state)

    def newcomer(self, fingerprint: dict[str, Any]) -> MultiState:
        """An empty state in buffers that nobody uses any more."""
        state = MultiState([copy.copy(layer) for layer in self.layers], fingerprint)
        state.reset()
        self.resident = weakref.ref(state)
        return state


class Graphs:
    """What was captured of one model under one plan."""

    def __init__(self, model: PreTrainedModel, plan: Plan, compiles: bool) -> None:
        self.model, self.plan, self.compiles = model, plan, compiles
        fixed = all(bound and shape for bound, shape in zip(plan.bounds, plan.shapes, strict=True))
        devices = {shape.device for shape in plan.shapes if shape}
        on_cuda = model.device.type == "cuda" and len(devices) == 1
        self.possible = fixed and on_cuda and set(plan.backends) == {"triton"}
        self._homes: dict[int, _Home] = {}
        weights = [*model.parameters()]
        self._ends = weights[:1] + weights[-1:]  # of the weights: casting or moving a model moves all
        self._weights = self._addresses()
        self._asked: Counter[tuple[int, int, bool]] = Counter()

    def of(self, state: MultiState, width: int = 1, last_only: bool = True, after: int = 0) -> Graph | None:
        """None where there is no graph to be had, which is said if there should have been one.

        Something new is captured when it has been asked for more than `after` times.
        """
        if not self.possible:
            return None
        self._forget_moved_weights()
        self._asked[state.batch_size, width, last_only] += 1
        if self._asked[state.batch_size, width, last_only] <= after:
            return None
        home = self._homes.get(state.batch_size)
        if home is None:
            home = self._homes[state.batch_size] = _Home(state)
        home.admit(state)
        key = width, last_only
        if key not in home.graphs:
            home.graphs[key] = self._capture(state, width, last_only)
        return home.graphs[key]

    def state(self, batch_size: int) -> MultiState:
        """An empty state, where one of its size has gone and left buffers and graphs behind; others are given back."""
        home = self._homes.get(batch_size)
        if home is not None and home.resident() is None:
            return home.newcomer(self.plan.fingerprint)
        self.release()
        return self.plan.state(batch_size)

    def _addresses(self) -> tuple[int, ...]:
        return tuple(weight.data_ptr() for weight in self._ends)

    def _forget_moved_weights(self) -> None:
        """Graphs read weights by their address: those of a model that was moved since would read freed memory."""
        if self._weights != (addresses := self._addresses()):
            self._weights = addresses
            for home in self._homes.values():
                home.graphs.clear()

    def release(self) -> None:
        """Give back the memory of graphs and buffers in which no state lives."""
        self._homes = {size: home for size, home in self._homes.items() if home.resident() is not None}

    def _capture(self, state: MultiState, width: int, last_only: bool) -> Graph | None:
        columns = [layer.columns for layer in state.layers]
        try:
            return Graph(self.model, self.plan, state, width, last_only, self.compiles)
        except RuntimeError as error:
            errors = _chain(error)
            if any(isinstance(e, torch.OutOfMemoryError) for e in errors):
                raise
            reason = (str(errors[-1]) or type(errors[-1]).__name__).splitlines()[0]
            warnings.warn(f"the model cannot be captured, so every kernel is launched ({reason})", stacklevel=4)
            return None
        finally:
            for layer, count in zip(state.layers, columns, strict=True):
                layer.columns = count  # what was warmed up was not read
