"""One captured CUDA graph: a read of ids in blocks that is replayed on the buffers of a state, which have one shape."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.device_memory import CAPTURING
from msrnn.core.state import MultiState
from msrnn.hf.read_plan import Shape
from msrnn.hf.state_spec import StateSpec
from msrnn.hf.wavefront import read_blocks, warm_up_streams
from msrnn.recall import Recalling


class Graph:
    """A read of [B, T] ids in blocks, captured on the buffers that a state has now."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: StateSpec,
        state: MultiState,
        shape: Shape,
        last_only: bool,
        compiles: bool,
        pool: Any,
        recalling: Recalling | None = None,
    ) -> None:
        B, device = state.batch_size, model.device
        self.ids = torch.zeros(B, shape.width, dtype=torch.long, device=device)
        # Warm-up and capture read padding only, which does not change the state.
        self.real = torch.zeros(B, shape.width, dtype=torch.bool, device=device)
        self.graph = torch.cuda.CUDAGraph()
        forward: Any = compile_model(model, B * shape.block) if compiles else model
        blocks = shape.width // shape.block

        def read(width: int) -> list[Tensor]:
            ids, real = self.ids[:, :width], self.real[:, :width]
            return read_blocks(forward, spec, state, ids, real, shape.block, last_only, recalling)

        with torch.cuda.device(device), layers_share_code() if compiles else nullcontext():

            def warm_up() -> None:
                for _ in range(2):
                    read(shape.block)
                if blocks > 1:
                    warm_up_streams(device, model.dtype, blocks)

            on_side_stream(warm_up)
            with capturing(self.graph, device, pool):
                self.logits = read(shape.width)
        self.real.fill_(True)
        self._masked = False

    def __call__(self, input_ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """ids [B, T] and a mask of the same shape, or none -> logits of each block, which the next call overwrites."""
        self.ids.copy_(input_ids)
        if mask is not None:
            self.real.copy_(mask)
            self._masked = True
        elif self._masked:
            self.real.fill_(True)
            self._masked = False
        self.graph.replay()
        return self.logits


def on_side_stream(work: Callable[[], None]) -> None:
    """Launch work before it is captured: on another stream, as CUDA asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Iterator[None]:
    """Capture what is launched meanwhile.

    Python collects no garbage meanwhile: freeing an old graph or pinned memory is not allowed then, and breaks the
    capture. Other threads may use the device. After an aborted capture, CUDA's random numbers would wait for its end,
    and fail, so their state is restored.
    """
    generator = torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
    before, collects = generator.clone_state(), gc.isenabled()
    gc.disable()
    try:
        with CAPTURING, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise
    finally:
        if collects:
            gc.enable()


def compile_model(model: PreTrainedModel, tokens: int) -> Any:
    """Compile the model. Products of one token with a matrix become kernels that are tuned to read at full speed."""
    return torch.compile(model, options={"coordinate_descent_tuning": True} if tokens == 1 else None)


def layers_share_code() -> Any:
    """torch.compile treats a layer's index as a variable, so that layers of one kind share their compiled code."""
    return torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)
