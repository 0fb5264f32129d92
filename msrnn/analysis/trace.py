"""Eviction times of a run: enough to rebuild every mask, figure and table about which tokens stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from msrnn.core.slots import HELD
from msrnn.errors import UsageError
from msrnn.hf.rnn import MultiStateRNN
from msrnn.layer import Record


@dataclass(frozen=True)
class Trace:
    """When every token left every bounded layer."""

    evicted_at: Tensor  # [B, bounded layers, G, T], by input column: the last column that saw it; T: held; -1: padding
    layers: tuple[int, ...]  # the model's own indices of the bounded layers

    def seen_at(self, column: int) -> Tensor:
        """[B, layers, G, T]: which tokens the query at a column attended to."""
        tokens = torch.arange(self.evicted_at.shape[-1], device=self.evicted_at.device)
        return (tokens <= column) & (column <= self.evicted_at)


def trace(
    rnn: MultiStateRNN,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    on_block: Callable[[int], None] | None = None,
) -> Trace:
    """Read the tokens from an empty state and take down when each one left each layer.

    Where layers differ in how many groups forget together, a layer of one group repeats it.
    """
    layers = tuple(i for i, bound in enumerate(rnn.spec.bounds) if bound and rnn.spec.shapes[i])
    if not layers:
        raise UsageError("nothing ever leaves an unbounded model: take a policy and a size to trace")
    if input_ids.ndim != 2:
        raise UsageError(f"input_ids of shape {list(input_ids.shape)}: must be [batch, tokens]")
    batch_size, length = input_ids.shape
    times = {i: torch.full((batch_size, _groups(rnn, i), length), HELD, dtype=torch.int32) for i in layers}

    def record(layer: int) -> Record:
        def take_down(position: Tensor, evicted_at: Tensor) -> None:
            left = (position >= 0) & (evicted_at != HELD)
            b, g, _ = (index.cpu() for index in left.nonzero(as_tuple=True))
            times[layer][b, g, position[left].long().cpu()] = evicted_at[left].cpu()

        return take_down

    rnn.read(input_ids, rnn.state(batch_size), attention_mask, last_only=True, on_block=on_block, record=record)
    groups = max(t.shape[1] for t in times.values())
    by_position = torch.stack([times[i].expand(-1, groups, -1) for i in layers], dim=1)
    return Trace(_by_column(by_position, attention_mask), layers)


def _groups(rnn: MultiStateRNN, layer: int) -> int:
    shape, bound = rnn.spec.shapes[layer], rnn.spec.bounds[layer]
    assert shape is not None
    assert bound is not None
    return bound.groups(shape.kv_heads)


def _by_column(by_position: Tensor, attention_mask: Tensor | None) -> Tensor:
    """From token positions, where a row's first token is 0, to the columns of the input."""
    length = by_position.shape[-1]
    result = torch.full_like(by_position, -1)
    for b, row in enumerate(by_position):
        columns = torch.arange(length) if attention_mask is None else attention_mask[b].cpu().nonzero()[:, 0]
        column_of = torch.cat([columns, torch.tensor([length])]).to(torch.int32)
        step = row[..., : len(columns)].long().clamp(max=len(columns))
        result[b, ..., columns] = column_of[step]
    return result
