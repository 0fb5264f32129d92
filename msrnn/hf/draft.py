"""A draft: a few columns, such as guesses, that are read at once and may be taken back.

Two functions on the buffers of a state launch nothing but kernels, so that they can be captured as CUDA graphs. The
first copies the slots and reads the columns. The second puts the copies back, and lets each layer attend once more to
the columns that stay. Those that go are padding, as are columns that a draft does not fill: one graph serves drafts of
any length up to its width, whatever part of them stays.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.mark import Mark
from msrnn.core.state import MultiState
from msrnn.hf.captured_graph import capturing, compile_model, layers_share_code, on_side_stream
from msrnn.hf.state_spec import StateSpec
from msrnn.hf.wavefront import read_blocks

NARROWEST = 4  # columns


def width_of(columns: int) -> int:
    """The width of the draft that reads this many columns: few widths serve all lengths."""
    return max(NARROWEST, 1 << (columns - 1).bit_length())


class Draft:
    """Reads at most `width` columns into a state, and takes back those that are wrong.

    The state belongs to the caller, who counts its columns, and has no unbounded layers. Between `read` and `take_back`
    nothing else may read into it. Drafts of one state may share a mark, which has the copies. `capture` makes a draft
    fast, and reads nothing.
    """

    def __init__(
        self, model: PreTrainedModel, spec: StateSpec, state: MultiState, mark: Mark, width: int, compiles: bool = False
    ) -> None:
        self._forward: Any = compile_model(model, state.batch_size * width) if compiles else model
        self._compiles, self._spec, self._state, self._device = compiles, spec, state, model.device
        shape = state.batch_size, width
        self._ids = torch.zeros(shape, dtype=torch.long, device=model.device)
        self._real = torch.zeros(shape, dtype=torch.bool, device=model.device)
        self._kept = torch.zeros(shape[:1], dtype=torch.long, device=model.device)  # columns that stay
        self._mark, self._seen, self._columns = mark, state.seen, 0
        self._read: Callable[[], Tensor] = self._launch_read
        self._go_back: Callable[[], None] = self._launch_return
        self.captured = False

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> Tensor:
        """Read ids [B, T] -> logits [B, T, V], which the next draft overwrites."""
        self._columns = input_ids.shape[1]
        new = slice(self._ids.shape[1] - self._columns, None)
        self._ids[:, new].copy_(input_ids)
        self._real.fill_(False)
        self._real[:, new].fill_(True)
        return self._read()[:, new]

    @torch.no_grad()
    def take_back(self, columns: int) -> None:
        """Take back the last columns of those that `read` has read, as if they had never been read."""
        if columns:
            self._columns -= columns
            self._kept.fill_(self._columns)
            self._go_back()

    def _launch_read(self) -> Tensor:
        state, before = self._state, self._state.marked
        self._mark.clear()
        self._mark.copy(dict(enumerate(state.layers)))
        self._seen.copy_(state.seen)
        state.marked = self._mark
        try:
            return read_blocks(
                self._forward, self._spec, state, self._ids, self._real, self._ids.shape[1], last_only=False
            )[0]
        finally:
            state.marked = before

    def _launch_return(self) -> None:
        keep = self._seen + self._kept
        self._mark.leave_out(keep)
        self._mark.restore(self._state, keep)

    @torch.no_grad()
    def capture(self) -> None:
        """Capture both as CUDA graphs. What they compute with stays in memory of their own until the next draft."""
        reading, returning = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._real.fill_(False)  # padding does not change the state
        self._kept.fill_(0)

        def warm_up() -> None:
            for _ in range(2):
                self._launch_read()
                self._launch_return()

        with torch.cuda.device(self._device), layers_share_code() if self._compiles else nullcontext():
            on_side_stream(warm_up)
            with capturing(reading, self._device):
                logits = self._launch_read()
            with capturing(returning, self._device, reading.pool()):
                self._launch_return()

        def replay() -> Tensor:
            reading.replay()
            return logits

        self._read, self._go_back, self.captured = replay, returning.replay, True
