"""Eviction times: when each token of a text is evicted from each layer.

Every mask, figure and table about which tokens are kept can be rebuilt from eviction times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from msrnn.checks import check_count
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.slots import HELD
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.inputs import check_input
from msrnn.hf.rnn import MultiStateRNN
from msrnn.layer import Record
from msrnn.recall import Recalling


@dataclass(frozen=True)
class Trace:
    """When each token is evicted from each bounded layer."""

    evicted_at: Tensor  # [B, bounded layers, G, T]: the last input column that sees the token; T: held; -1: padding
    layers: tuple[int, ...]  # the model's own indices of the bounded layers
    recalled: Tensor | None = None  # [blocks, bounded layers, T] bool: what some KV head recalls; None: nothing

    def seen_at(self, column: int) -> Tensor:
        """[B, layers, G, T]: which tokens the query at a column attends to."""
        tokens = torch.arange(self.evicted_at.shape[-1], device=self.evicted_at.device)
        return (tokens <= column) & (column <= self.evicted_at)


def trace(
    rnn: MultiStateRNN,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    on_block: Callable[[int], None] | None = None,
    protect: range = range(0),
    recall_every: int | None = None,
) -> Trace:
    """Read the tokens [B, T] from an empty state and record when each one is evicted from each layer.

    If layers differ in their number of groups, a layer of one group repeats it. `on_block` gets the number of columns
    of each block after it is read. Tokens of the columns `protect` are never evicted. With `recall_every`, blocks of
    that many tokens of one sequence recall archived rows, and what each block recalls is recorded as well.
    """
    layers = tuple(i for i, bound in enumerate(rnn.spec.bounds) if bound and rnn.spec.shapes[i])
    if not layers:
        raise UsageError("policy 'full' evicts nothing, so there is nothing to trace: use a bounded policy and a size")
    if input_ids.ndim != 2:
        raise UsageError(f"input_ids of shape {list(input_ids.shape)}: must be [batch, tokens]")
    batch_size, length = input_ids.shape
    times = {i: torch.full((batch_size, _groups(rnn, i), length), HELD, dtype=torch.int32) for i in layers}

    def record(layer: int) -> Record:
        def store(position: Tensor, evicted_at: Tensor) -> None:
            evicted = (position >= 0) & (evicted_at != HELD)
            b, g, _ = (index.cpu() for index in evicted.nonzero(as_tuple=True))
            times[layer][b, g, position[evicted].long().cpu()] = evicted_at[evicted].cpu()

        return store

    state, recalled = rnn.state(batch_size), None
    edges = _edges(protect, length)
    if recall_every is not None:
        _check_recalls(rnn, recall_every, input_ids, attention_mask, protect)
        recalled = _read_recalling(rnn, input_ids, state, layers, recall_every, on_block, record, protect)
    else:
        for begin, end in pairwise(sorted({0, *edges, length})):
            mask = None if attention_mask is None else attention_mask[:, begin:end]
            how: Any = {"last_only": True, "on_block": on_block, "record": record, "protect": begin in protect}
            rnn.read(input_ids[:, begin:end], state, mask, **how)
    for i in layers:
        shape, bound = rnn.spec.shapes[i], rnn.spec.bounds[i]
        if shape and shape.shards and bound and bound.policy.per == "head":  # each process has groups of its own
            times[i] = shape.shards.gather(times[i].to(shape.device), 1).cpu()
    groups = max(t.shape[1] for t in times.values())
    by_position = torch.stack([times[i].expand(-1, groups, -1) for i in layers], dim=1)
    return Trace(_by_column(by_position, attention_mask), layers, recalled)


def _check_recalls(rnn: MultiStateRNN, every: int, ids: Tensor, mask: Tensor | None, protect: range) -> None:
    check_count("recall_every", every, of="tokens")
    if rnn.spec.recall is None:
        advice = "make it with recall=, the number of rows to recall"
        raise UsageError("this RNN archives nothing", name="recall_every", value=every, advice=advice)
    if len(ids) > 1 or mask is not None:
        raise UsageError("one text without padding recalls", name="recall_every", value=every, advice="trace it alone")
    if protect.start % every:
        reason = f"must begin with a block of {every} tokens, which are read together"
        raise UsageError(reason, name="protect", value=protect, advice=f"begin at a multiple of {every}")


@torch.no_grad()
def _read_recalling(
    rnn: MultiStateRNN,
    input_ids: Tensor,
    state: MultiState,
    layers: Sequence[int],
    every: int,
    on_block: Callable[[int], None] | None,
    record: Callable[[int], Record],
    protect: range,
) -> Tensor:
    """Read a text block by block -> which tokens some KV head recalled for each block [blocks, layers, T]."""
    input_ids, _ = check_input(rnn.model, rnn.spec, input_ids, state, None)
    if protect:
        rnn.spec.check_protect(len(protect))
    blocks = input_ids.split(every, 1)
    recalled = torch.zeros(len(blocks), len(layers), input_ids.shape[1], dtype=torch.bool)
    for b, block in enumerate(blocks):
        columns = block.shape[1]
        inside = torch.tensor([len(range(b * every, min(b * every + columns, protect.stop)))])
        with state.protecting(inside) if b * every in protect else nullcontext(), state.reading(columns):
            rnn.forward(block, state, None, True, record, Recalling(every, starts=True))
        for i, layer in enumerate(layers):
            slots = state.layers[layer]
            if isinstance(slots, RecallSlots):
                guests = slots.guest_position if slots.shards is None else slots.shards.gather(slots.guest_position, 1)
                guests = guests.flatten().cpu()
                recalled[b, i, guests[guests >= 0].long()] = True
        if on_block:
            on_block(columns)
    return recalled


def _edges(protect: range, length: int) -> tuple[int, int]:
    if not (isinstance(protect, range) and protect.step == 1 and 0 <= protect.start <= protect.stop <= length):
        raise UsageError(f"must be a range of the {length} columns", name="protect", value=protect)
    return protect.start, protect.stop


def _groups(rnn: MultiStateRNN, layer: int) -> int:
    shape, bound = rnn.spec.shapes[layer], rnn.spec.bounds[layer]
    assert shape is not None
    assert bound is not None
    return bound.groups(shape.kv_heads)


def _by_column(by_position: Tensor, attention_mask: Tensor | None) -> Tensor:
    """From token positions, where a sequence's first token is 0, to the columns of the input."""
    length = by_position.shape[-1]
    result = torch.full_like(by_position, -1)
    for b, times in enumerate(by_position):
        columns = torch.arange(length) if attention_mask is None else attention_mask[b].cpu().nonzero()[:, 0]
        column_of = torch.cat([columns, torch.tensor([length])]).to(torch.int32)
        step = times[..., : len(columns)].long().clamp(max=len(columns))
        result[b, ..., columns] = column_of[step]
    return result


class ChunkTrace(NamedTuple):
    """The trace of one chunk of text without padding, as arrays."""

    evicted_at: NDArray[numpy.int32]  # [L, G, T]: the last step that sees each token; T: never evicted
    layers: tuple[int, ...]  # the model's own indices
    sizes: tuple[int, ...]  # tokens that each of these layers may keep; sliding layers have their own
    recalled: NDArray[numpy.bool_] | None = None  # [blocks, L, T]: tokens that some KV head recalls; None: nothing


def trace_chunks(
    rnn: MultiStateRNN,
    chunks: ArrayLike,
    on_tokens: Callable[[int], object] | None = None,
    protect: range = range(0),
    recall_every: int | None = None,
) -> list[ChunkTrace]:
    """Trace chunks of token ids [N, T] as one batch; `protect` and `recall_every` are as in `trace`."""
    rows = torch.from_numpy(numpy.asarray(chunks).astype(numpy.int64))

    def on_block(columns: int) -> None:
        if on_tokens:
            on_tokens(columns * len(rows))

    traced = trace(rnn, rows, on_block=on_block, protect=protect, recall_every=recall_every)
    bounds = [rnn.spec.bounds[layer] for layer in traced.layers]
    sizes = tuple(bound.size for bound in bounds if bound)
    recalled = None if traced.recalled is None else traced.recalled.numpy()
    return [ChunkTrace(times.numpy(), traced.layers, sizes, recalled) for times in traced.evicted_at]
