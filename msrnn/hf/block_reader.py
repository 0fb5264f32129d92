"""Reading a text in blocks: several in flight together where there are CUDA graphs, else one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.state import MultiState
from msrnn.hf.cuda_graphs import Graphs
from msrnn.hf.state_spec import StateSpec
from msrnn.hf.wavefront import Wave, read_columns
from msrnn.layer import Record


class BlockReader:
    """Reads tokens that recall nothing.

    block    columns that pass through the model at once, as they were given
    largest  the most of them where they were not
    """

    def __init__(
        self, model: PreTrainedModel, spec: StateSpec, graphs: Graphs, block: int | None, largest: int
    ) -> None:
        self.model, self.spec, self.graphs, self.block, self.largest = model, spec, graphs, block, largest

    def wave(self, batch_size: int, last_only: bool) -> Wave:
        return self.graphs.wave(batch_size, self.block, self.largest, last_only)

    def read(
        self,
        input_ids: Tensor,
        state: MultiState,
        mask: Tensor | None,
        last_only: bool,
        on_block: Callable[[int], None] | None,
        record: Callable[[int], Record] | None,
    ) -> Tensor:
        """Read ids [B, T] -> logits [B, T, V], or the last [B, 1, V]; the other arguments as for `MultiStateRNN`."""
        wave = self.wave(state.batch_size, last_only)
        logits: Tensor | None = None
        start = 0
        for width in wave.widths(input_ids.shape[1]):
            columns = slice(start, start + width)
            ids, part = input_ids[:, columns], None if mask is None else mask[:, columns]
            blocks = self._read_wave(ids, state, part, wave, last_only, record)
            if last_only:
                logits = blocks[-1][:, -1:].clone()
            else:
                if logits is None:
                    logits = blocks[0].new_empty(*input_ids.shape, blocks[0].shape[-1])
                torch.cat(blocks, dim=1, out=logits[:, columns])
            if on_block:
                on_block(width)
            start += width
        assert logits is not None
        return logits

    def _read_wave(
        self,
        ids: Tensor,
        state: MultiState,
        mask: Tensor | None,
        wave: Wave,
        last_only: bool,
        record: Callable[[int], Record] | None,
    ) -> list[Tensor]:
        """Read columns that are in flight together -> the logits of each block."""
        if record is None and state.marked is None and self.graphs.possible:
            return self.graphs.read(ids, state, mask, wave, last_only)
        masks = [None] * ids.shape[1] if mask is None else mask.split(wave.alone, 1)
        blocks = []
        for piece, part in zip(ids.split(wave.alone, 1), masks, strict=False):
            with state.reading(piece.shape[1]):
                blocks.append(read_columns(self.model, self.spec, state, piece, part, last_only, record))
        return blocks
