"""What a cell makes of a batch of chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.errors import UsageError
from msrnn.evaluation.cells import BASELINE, Cell
from msrnn.evaluation.loss import losses
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import FULL


class Reader:
    """A cell's model. It is told how many tokens of a chunk open it: see `pieces`."""

    def __init__(self, model: PreTrainedModel, cell: Cell, opening: int) -> None:
        self.cell, self.opening = cell, opening
        bounded = cell.policy not in (FULL, BASELINE)
        self.rnn = MultiStateRNN(model, cell.policy if bounded else FULL, cell.size if bounded else None)

    def nll(self, input_ids: Tensor, on_tokens: Callable[[int], object] | None = None) -> list[float]:
        """Chunks [B, T] -> each one's negative log-likelihood, summed over the tokens that it predicts."""
        total = torch.zeros(len(input_ids), dtype=torch.float64)
        for ids in self._read_together(input_ids):
            on_block = partial(_times, len(ids), on_tokens) if on_tokens else None
            predicted = losses(self.rnn, ids, self.rnn.state(len(ids)), on_block)[:, max(1, self.opening) - 1 :]
            total += predicted.cpu().double().sum(-1).view(-1, len(total)).sum(0)
        return total.tolist()

    def _read_together(self, input_ids: Tensor) -> list[Tensor]:
        """Rows of equal length: the chunks, or pieces of theirs, of which no more at once than make a block."""
        if self.cell.policy != BASELINE:
            return [input_ids]
        assert self.cell.size is not None
        cut = pieces(input_ids, self.cell.size, self.opening)
        whole, last = cut[:-1], cut[-1]
        together = max(1, self.rnn.block // self.cell.size)
        return [*(torch.cat(whole[i : i + together]) for i in range(0, len(whole), together)), last]


def _times(rows: int, on_tokens: Callable[[int], object], columns: int) -> None:
    on_tokens(rows * columns)


def pieces(input_ids: Tensor, size: int, opening: int) -> list[Tensor]:
    """Chunks [B, T] as texts of at most `size` tokens [B, t], which together predict what the whole chunk predicts.

    The chunk's opening stands in front of each. Without one, a piece begins with the last token of the piece before.
    """
    given = max(1, opening)
    if size <= given:
        raise UsageError(f"--size {size}: a piece of the baseline has {given} given tokens and must predict one more")
    cut = []
    for start in range(given, input_ids.shape[1], size - given):
        front = input_ids[:, :opening] if opening else input_ids[:, start - 1 : start]
        cut.append(torch.cat([front, input_ids[:, start : start + size - given]], dim=1))
    return cut
