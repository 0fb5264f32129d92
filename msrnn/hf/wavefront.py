"""Consecutive blocks of a text in flight at once on a GPU, each some layers behind the block before it: a wavefront.

A layer of a block needs the layer below it of the same block, and its own slots as the block before has left them;
nothing else. The eviction scan of a layer takes long and occupies few multiprocessors. With many blocks in flight, the
scans of many layers run at the same time as each other and as matrix products. The states and logits are those of
reading block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from msrnn.core.device_memory import available_bytes
from msrnn.core.state import MultiState
from msrnn.hf.cache_layers import Place
from msrnn.hf.cache_state import CachedState
from msrnn.hf.inputs import positions_of
from msrnn.hf.state_spec import StateSpec
from msrnn.hf.tensor_parallel import naming_lost_ranks
from msrnn.layer import Record
from msrnn.recall import Recalling

PRIORITIES = 4  # levels that CUDA streams have in torch
IN_FLIGHT = 16_384  # tokens of all sequences and blocks together: bounds the memory of activations at any batch size
BLOCK_TOKENS = 512  # over all sequences: from 1,024 on, cuBLAS clears memory, and a CUDA graph runs that in order
FEW_BLOCKS, LEAST_TOKENS = 8, 128  # a single text of fewer blocks is read in shorter ones, of at least so many tokens
SHORTEST_BLOCK = 32  # of one sequence: below, kernels that read all slots for a few tokens cost more than is gained
MOST_BLOCKS, MOST_STEPWISE_BLOCKS = 64, 8  # in flight; where blocks are read token by token, a graph has many kernels
LOGIT_BYTES = 2**30  # of a captured read that returns the logits of all tokens


class Wave(NamedTuple):
    """How a text is read: `block` columns pass through the model at once, at most `blocks` blocks are in flight."""

    block: int
    blocks: int
    alone: int  # columns of a block where one is read at a time
    shortest: int  # columns of a block where few are in flight

    def widths(self, columns: int) -> Iterator[int]:
        """Columns that are read together: powers of two of blocks, for few graphs to fit all lengths; then the rest."""
        while columns >= self.block and (columns > self.alone or columns % self.block == 0):
            width = self.block * min(self.blocks, 1 << (columns // self.block).bit_length() - 1)
            yield width
            columns -= width
        if columns:
            yield columns

    def block_of(self, width: int) -> int:
        """Columns of a block where `width` columns are in flight: where these are few blocks, shorter ones."""
        block = self.block
        while self.block < width < FEW_BLOCKS * block and block % 2 == 0 and block // 2 >= self.shortest:
            block //= 2
        return block


def wave_of(batch_size: int, block: int | None, largest: int, blocks: int, fitting: int) -> Wave:
    """How a batch is read: in blocks as given, or of at most `largest` columns; at most `blocks` blocks at once.

    Of blocks in flight together, `fitting` tokens over all sequences fit into memory.
    """
    columns = max(1, IN_FLIGHT // batch_size)
    if blocks == 1:
        one = block or min(largest, columns)
        return Wave(one, 1, one, one)
    one = block or min(largest, columns, max(SHORTEST_BLOCK, fitting // batch_size))
    shorter = block is None and batch_size == 1
    block = block or min(one, max(BLOCK_TOKENS // batch_size, SHORTEST_BLOCK))
    most = min(blocks, columns // block, fitting // (block * batch_size))
    if most <= 1:
        return Wave(one, 1, one, one)
    return Wave(block, 1 << most.bit_length() - 1, one, LEAST_TOKENS if shorter else block)


def fitting_tokens(model: PreTrainedModel, spec: StateSpec, last_only: bool) -> int:
    """Tokens that may be in flight: what they take, by a generous estimate, is half of the free memory at most.

    A token takes the outputs of a layer's matrices, twice, and its weights for the scan. Kept logits have a limit too.
    """
    shapes = [*zip(spec.shapes, spec.bounds, spec.setups, strict=True)]
    outputs = sum(module.out_features for module in model.modules() if isinstance(module, nn.Linear))
    scanned = max(
        (
            4 * shape.heads * (shape.shards.count if shape.shards else 1) * (bound.slots + setup.chunk)
            for shape, bound, setup in shapes
            if shape and bound and setup
        ),
        default=0,
    )
    embeddings: Any = model.get_input_embeddings()
    tokens = [IN_FLIGHT]
    if not last_only:
        tokens.append(LOGIT_BYTES // (embeddings.num_embeddings * model.dtype.itemsize))
    free = available_bytes(model.device)
    if free is not None:
        tokens.append(free // 2 // (2 * outputs // len(shapes) * model.dtype.itemsize + scanned))
    return min(tokens)


def changes_rope(model: PreTrainedModel) -> bool:
    """Whether RoPE frequencies depend on the length, so that blocks in flight would change them for each other."""
    kinds = [str(getattr(module, "rope_type", "")) for module in model.modules()]
    return any("dynamic" in kind or "longrope" in kind for kind in kinds)


def in_flight_together(model: PreTrainedModel) -> bool:
    """Whether blocks may be in flight together: not where modules change what they keep, as quantized ones may do."""
    return getattr(model, "hf_quantizer", None) is None and not changes_rope(model)


class Turns:
    """The order of blocks in every layer: a block uses the slots after the block before it has left them."""

    def __init__(self, before: Turns | None = None) -> None:
        self._before = before._left if before else {}
        self._left: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def of(self, layer: int) -> Iterator[None]:
        stream = torch.cuda.current_stream()
        if layer in self._before:
            stream.wait_event(self._before[layer])
        yield
        self._left[layer] = torch.cuda.Event()
        self._left[layer].record(stream)


@lru_cache
def _all_streams(device: torch.device) -> list[torch.cuda.Stream]:
    count = range(MOST_BLOCKS)
    return [torch.cuda.Stream(device, priority=PRIORITIES * c // MOST_BLOCKS + 1 - PRIORITIES) for c in count]


def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """A stream for each block; earlier blocks have a higher priority, since later ones wait for them.

    They are the same for all counts, since memory is used again on its own stream only.
    """
    return _all_streams(device)[:: MOST_BLOCKS // count][:count]


def warm_up_streams(device: torch.device, dtype: torch.dtype, count: int) -> None:
    """Let cuBLAS allocate what it keeps for each stream, which should not be memory of a captured graph."""
    current = torch.cuda.current_stream(device)
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    for stream in _streams(device, count):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            linear(ones, ones)
            linear(ones, ones, ones[0])
        current.wait_stream(stream)


def read_columns(
    model: PreTrainedModel,
    spec: StateSpec,
    state: MultiState,
    input_ids: Tensor,
    mask: Tensor | None,
    last_only: bool,
    record: Callable[[int], Record] | None = None,
    recalling: Recalling | None = None,
) -> Tensor:
    """One forward pass over columns that fit into one block -> logits. The caller counts the columns."""
    with naming_lost_ranks(spec.model.shards):
        logits: Tensor = model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions_of(state.seen, input_ids, mask),
            past_key_values=spec.cache(
                CachedState(state, recalling=recalling), record, None if mask is None else mask.bool()
            ),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        ).logits
    return logits


def read_blocks(
    forward: Callable[..., Any],
    spec: StateSpec,
    state: MultiState,
    input_ids: Tensor,
    real: Tensor,
    block: int,
    last_only: bool,
    recalling: Recalling | None = None,
) -> list[Tensor]:
    """Read ids [B, T], `block` columns at a time, all blocks in flight at once -> the logits of each block.

    `real` [B, T] is False where padding. T is a multiple of `block`, or less. Only kernels are launched: this can be
    captured as a CUDA graph. The caller counts the columns.
    """
    position = state.advance(real)
    parts = [_blocks(columns, block) for columns in (input_ids, position, position.clamp(min=0).long(), real)]
    blocks = [*zip(*parts, strict=True)]

    def read(columns: tuple[Tensor, ...], turns: Turns | None) -> Tensor:
        ids, position, position_ids, real = columns
        layers = range(len(state.layers))
        places = [Place(position, turns.of(layer) if turns else nullcontext()) for layer in layers]
        logits: Tensor = forward(
            input_ids=ids,
            # A mask of four dimensions is not inspected: reading it back would break the capture.
            attention_mask=real[:, None, None].expand(-1, 1, ids.shape[1], -1),
            position_ids=position_ids,
            past_key_values=spec.cache(CachedState(state, recalling=recalling), real=real, places=places),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        ).logits
        return logits

    if len(blocks) == 1:
        return [read(blocks[0], None)]
    current, turns, logits = torch.cuda.current_stream(input_ids.device), Turns(), []
    streams = _streams(input_ids.device, len(blocks))
    started = []
    try:
        for stream, columns in zip(streams, blocks, strict=True):
            turns = Turns(turns)
            stream.wait_stream(current)
            started.append(stream)
            with torch.cuda.stream(stream):
                logits.append(read(columns, turns))
    finally:  # also after an interruption: what was launched still uses the state
        for stream in started:
            current.wait_stream(stream)
    return logits


def _blocks(columns: Tensor, block: int) -> list[Tensor]:
    """[B, T] in blocks with the strides of a whole tensor: torch.compile compiles again for others."""
    if columns.shape[1] <= block:
        return [columns.contiguous()]
    return [*columns.unflatten(1, (-1, block)).transpose(0, 1).contiguous()]
