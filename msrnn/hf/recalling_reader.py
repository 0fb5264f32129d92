"""Reading tokens that recall: each sequence alone, in forward passes that begin where its blocks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from msrnn.checks import check_count
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.cuda_graphs import Graphs
from msrnn.hf.inputs import split_at_blocks
from msrnn.hf.read_plan import Shape
from msrnn.hf.state_spec import StateSpec
from msrnn.hf.wavefront import read_columns
from msrnn.recall import Recalling

TOGETHER = 16  # tokens of a question in one captured graph, which reads the weights once and has some thousand kernels


class RecallingReader:
    """Reads tokens that recall, by captured graphs where there are any."""

    def __init__(self, model: PreTrainedModel, spec: StateSpec, graphs: Graphs, block: int) -> None:
        self.model, self.spec, self.graphs, self.block = model, spec, graphs, block

    def check(self, every: int, mask: Tensor | None, record: Any) -> None:
        """Refuse to recall without an archive, and what cannot be read block by block."""
        check_count("recall_every", every, of="tokens")
        if record is not None:
            raise UsageError("tokens that recall cannot be traced", name="recall_every", value=every)
        if mask is not None and not bool(mask.any()):
            raise UsageError("attention_mask: has no token that could recall; leave the call out")
        if self.spec.recall is None:
            raise UsageError(
                "this RNN archives nothing",
                name="recall_every",
                value=every,
                advice="make it with recall=, the number of rows to recall",
            )

    def read(
        self,
        input_ids: Tensor,
        state: MultiState,
        mask: Tensor | None,
        last_only: bool,
        on_block: Callable[[int], None] | None,
        every: int,
    ) -> Tensor:
        """Read ids [B, T], each sequence alone: the blocks of different sequences begin at other columns -> logits."""
        if state.batch_size == 1:
            logits = self._read_one(input_ids, state, mask, last_only, on_block, every)
            assert logits is not None
            return logits
        columns, captures = input_ids.shape[1], self.graphs.possible
        parts = [None] * state.batch_size if mask is None else mask.split(1)
        each = []
        with state.reading(columns):
            for b, (ids, part) in enumerate(zip(input_ids.split(1), parts, strict=True)):
                # The buffers of a captured graph are those of one state: no view of another's can be read with it.
                one = self.graphs.select(state, torch.tensor([b])) if captures else state.view(slice(b, b + 1))
                each.append(self._read_one(ids, one, part, last_only, None, every))
                if captures:
                    state.set_sequence(b, one)
        if on_block:
            on_block(columns)
        some = next(logits for logits in each if logits is not None)
        return torch.cat([torch.zeros_like(some) if logits is None else logits for logits in each])

    def _read_one(
        self,
        input_ids: Tensor,
        state: MultiState,
        mask: Tensor | None,
        last_only: bool,
        on_block: Callable[[int], None] | None,
        every: int,
    ) -> Tensor | None:
        """Read one sequence without its padding -> logits, if it has tokens."""
        real = None if mask is None else mask[0].bool()
        ids = input_ids if real is None else input_ids[:, real]
        captured = TOGETHER if every == 1 else every
        logits = []
        for piece in split_at_blocks(ids, int(state.seen), every, captured if self.graphs.possible else self.block):
            logits.append(self._read_piece(piece, state, last_only, every))
            if on_block:
                on_block(piece.shape[1])
        state.columns += input_ids.shape[1] - ids.shape[1]  # padding counts as read
        if last_only or not logits:
            return logits[-1] if logits else None
        if real is None:
            return torch.cat(logits, dim=1)
        read = torch.cat(logits, dim=1)
        spread = read.new_zeros(1, input_ids.shape[1], read.shape[-1])
        spread[:, real] = read
        return spread

    def _read_piece(self, ids: Tensor, state: MultiState, last_only: bool, every: int) -> Tensor:
        """Read one block that recalls, or several in one forward pass -> logits."""
        columns = ids.shape[1]
        width = 1 if columns == 1 else TOGETHER if every == 1 else every
        recalling = Recalling(every, starts=every > 1)
        graph = None
        if columns == width or every == 1:  # a block with padding would recall for its padding, too
            graph = self.graphs.of(
                state, Shape(width, width), last_only, rest=every == 1 and width > 1, recalling=recalling
            )
        with state.reading(columns):
            if graph is None:
                whole = Recalling(every, starts=True)
                return read_columns(self.model, self.spec, state, ids, None, last_only, recalling=whole)
            if columns == width:
                return graph(ids)[0].clone()
            # Padding is on the left: the guests of the last token stay.
            real = pad(torch.ones_like(ids, dtype=torch.bool), (width - columns, 0))
            return graph(pad(ids, (width - columns, 0)), real)[0][:, -columns:].clone()
