"""Forward passes as CUDA graphs: the buffers of a bounded state have one shape, so a captured graph fits any length.

One graph per batch size and shape: a decode step, or some blocks of a prompt. The graphs of a batch size share one set
of buffers, which belongs to one state at a time. When another state is read, it gets them, and the first gets a copy.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from msrnn.core.device_memory import is_out_of_memory
from msrnn.core.mark import Mark
from msrnn.core.shards import CHECKS, least
from msrnn.core.state import MultiState
from msrnn.hf.captured_graph import Graph
from msrnn.hf.draft import Draft, width_of
from msrnn.hf.fingerprint import addresses_of
from msrnn.hf.graph_buffers import GraphBuffers
from msrnn.hf.read_plan import STEP, ReadStep, Shape, plan_read
from msrnn.hf.state_spec import StateSpec
from msrnn.hf.wavefront import (
    MOST_BLOCKS,
    MOST_STEPWISE_BLOCKS,
    Wave,
    fitting_tokens,
    in_flight_together,
    read_blocks,
    wave_of,
)
from msrnn.recall import Recalling

C = TypeVar("C")
WORTH_CAPTURING = 2  # reads of one shape before one is captured, which takes about as long as two
WORTH_CAPTURING_STEPS = 64  # the same for several blocks that are read token by token: some hundred thousand kernels


def _first_error(error: BaseException) -> BaseException:
    """The error that began it: an aborted capture raises a second one."""
    return error if error.__context__ is None else _first_error(error.__context__)


class Graphs:
    """The captured graphs of one model under one spec."""

    def __init__(self, model: PreTrainedModel, spec: StateSpec, compiles: bool) -> None:
        self.model, self.spec, self.compiles = model, spec, compiles
        fixed = all(bound and shape for bound, shape in zip(spec.bounds, spec.shapes, strict=True))
        devices = {shape.device for shape in spec.shapes if shape}
        on_cuda = model.device.type == "cuda" and len(devices) == 1
        self.stepwise = spec.decodes_repositioned
        self._shards = spec.model.shards
        # Other archives are searched by the host, which a captured graph cannot do.
        archives = spec.recall is None or spec.paged
        self.possible = fixed and on_cuda and set(spec.backends) == {"triton"} and not CHECKS and archives
        if self.possible and self._shards is not None and not self._shards.capturable:
            warnings.warn(
                "the processes that share this model do not speak by NCCL, so no CUDA graph can be captured: kernels "
                "are launched one by one",
                stacklevel=4,
            )
            self.possible = False
        self._buffers: dict[int, GraphBuffers] = {}
        self._waves: dict[tuple[int, bool], Wave] = {}
        # Enough to notice a move or a cast, which changes all weights.
        weights = [*model.parameters()]
        self._watched = [weights[0], weights[-1], min(weights, key=Tensor.numel)]
        self._remember_weights()
        self._requests: Counter[tuple[int, Shape, bool]] = Counter()
        self._compiles_rests = False
        self._drafts: dict[int, Draft] = {}  # by width, of one state
        self._drafted: tuple[MultiState, Mark] | None = None  # that state, and its copies

    def wave(self, batch_size: int, block: int | None, largest: int, last_only: bool) -> Wave:
        """How a batch is read. The first read decides by the free memory, so that its graphs serve later reads."""
        if not self.possible:
            return wave_of(batch_size, block, largest, blocks=1, fitting=0)
        key = batch_size, last_only
        if key not in self._waves:
            blocks = MOST_STEPWISE_BLOCKS if self.stepwise else MOST_BLOCKS
            if not in_flight_together(self.model) or self._shards is not None:
                blocks = 1  # processes that share a model would speak in several orders
            fitting = least(fitting_tokens(self.model, self.spec, last_only), self._shards, self.model.device)
            self._waves[key] = wave_of(batch_size, block, largest, blocks, fitting)
        return self._waves[key]

    def of(
        self,
        state: MultiState,
        shape: Shape = STEP,
        last_only: bool = True,
        after: int = 0,
        rest: bool = False,
        recalling: Recalling | None = None,
    ) -> Graph | None:
        """The graph for a state, captured after more than `after` requests; None where there is none.

        The rest of a text is not compiled, which would take longer than it saves, unless many texts follow. A model
        that cannot be captured gives a warning.
        """
        if not self.possible:
            return None
        self._forget_moved_weights()
        self._requests[state.batch_size, shape, last_only] += 1
        if self._requests[state.batch_size, shape, last_only] <= after:
            return None
        buffers = self._buffers.get(state.batch_size)
        if buffers is None:
            buffers = self._buffers[state.batch_size] = GraphBuffers(state)
        buffers.assign(state)
        segments = state.reserve(shape.width)
        key = shape, last_only, recalling, segments if recalling else 0
        if key not in buffers.graphs:
            compiles = self.compiles and (self._compiles_rests or not rest)
            buffers.graphs[key] = self._capture(state, shape, last_only, compiles, recalling)
        return buffers.graphs[key]

    @contextmanager
    def compiling_rests(self) -> Iterator[None]:
        """In this `with` block, also compile reads that are shorter than a block of tokens: many texts will follow."""
        self._compiles_rests = True
        try:
            yield
        finally:
            self._compiles_rests = False

    def read(
        self, input_ids: Tensor, state: MultiState, mask: Tensor | None, wave: Wave, last_only: bool
    ) -> list[Tensor]:
        """Read ids [B, T] that are in flight together -> the logits of each block, which the next call overwrites."""
        graphs: dict[Shape, Graph | None] = {}

        def has_graph(shape: Shape) -> bool:
            together = self.stepwise and shape.width > shape.block
            after = WORTH_CAPTURING_STEPS if together else WORTH_CAPTURING
            graphs[shape] = self.of(state, shape, last_only, after, rest=shape.width < wave.block)
            return graphs[shape] is not None

        steps = plan_read(input_ids.shape[1], wave, self.stepwise, has_graph)
        logits, start = [], 0
        for step in steps:
            columns = slice(start, start + step.width)
            part = None if mask is None else mask[:, columns]
            graph = graphs[step.shape] if step.replays else None
            blocks = self._take(step, graph, input_ids[:, columns], state, part, last_only)
            if len(steps) > 1:
                blocks = [block.clone() for block in blocks]  # the next step overwrites them
            logits += blocks
            start += step.width
        return logits

    def _take(
        self, step: ReadStep, graph: Graph | None, ids: Tensor, state: MultiState, mask: Tensor | None, last_only: bool
    ) -> list[Tensor]:
        """Read the columns of one step -> the logits of each block, without those of padding."""
        with state.reading(step.width):
            if graph is not None and not step.padding:
                return graph(ids, mask)
            real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            if step.padding:
                ids, real = (pad(columns, (step.padding, 0)) for columns in (ids, real))
            if graph is not None:
                blocks = graph(ids, real)
            else:
                blocks = read_blocks(self.model, self.spec, state, ids, real, step.shape.block, last_only)
        return [logits[:, -step.width :] for logits in blocks]

    def draft(self, state: MultiState, columns: int) -> Draft:
        """A draft of at most this many columns, for a state whose buffers stay where they are."""
        self._forget_moved_weights()
        if self._drafted is None or self._drafted[0] is not state:
            self._drafts.clear()
            self._drafted = state, Mark(state)
        width = width_of(columns) if self.possible else columns
        if width not in self._drafts:
            draft = Draft(self.model, self.spec, *self._drafted, width, self.possible and self.compiles)
            if self.possible:
                self._or_warn(draft.capture)
            self._drafts[width] = draft
        return self._drafts[width]

    def state(self, batch_size: int) -> MultiState:
        """An empty state, in the buffers of an earlier one if they are free; other free buffers are released."""
        buffers = self._buffers.get(batch_size)
        if buffers is not None and buffers.owner() is None:
            return buffers.empty_state(self.spec.fingerprint)
        self.release()
        return self.spec.state(batch_size)

    def select(self, state: MultiState, index: Tensor) -> MultiState:
        """The sequences [N] of a state, in buffers that already have a captured graph, if there are any."""
        if not self.possible:
            return state.select(index)
        chosen = self.state(len(index))
        chosen.become(state, index)
        return chosen

    def _pool(self) -> Any:
        """The memory of the other graphs, if there are any: graphs are replayed one after the other."""
        graphs = [graph for buffers in self._buffers.values() for graph in buffers.graphs.values() if graph]
        return graphs[0].graph.pool() if graphs else None

    def _addresses(self) -> list[int]:
        return [address for weight in self._watched for address in addresses_of(weight)]

    def _remember_weights(self) -> None:
        self._weights = self._addresses()
        self._kept = self._watched[-1].detach()  # so that weights which move away and back get another address

    def _forget_moved_weights(self) -> None:
        """Drop graphs when weights have moved: a graph reads them at their old addresses."""
        if self._weights != self._addresses():
            self._remember_weights()
            self._drafts.clear()
            for buffers in self._buffers.values():
                buffers.graphs.clear()

    def release(self) -> None:
        """Free the graphs and buffers that no state uses."""
        self._buffers = {size: buffers for size, buffers in self._buffers.items() if buffers.owner() is not None}

    def _capture(
        self, state: MultiState, shape: Shape, last_only: bool, compiles: bool, recalling: Recalling | None
    ) -> Graph | None:
        return self._or_warn(
            lambda: Graph(self.model, self.spec, state, shape, last_only, compiles, self._pool(), recalling)
        )

    def _or_warn(self, capture: Callable[[], C]) -> C | None:
        """Capture; a model that cannot be captured gives a warning and None."""
        try:
            return capture()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            first = _first_error(error)
            reason = (str(first) or type(first).__name__).splitlines()[0]
            warnings.warn(
                f"this model cannot be captured as a CUDA graph, so its kernels are launched one by one ({reason})",
                stacklevel=5,
            )
            return None
