"""Eviction times: when each token is evicted from each layer. `trace` computes them, `TraceStore` keeps them on disk.

Every mask, figure and table about which tokens are kept can be rebuilt from eviction times.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.atomic import write_atomically
from msrnn.core.slots import HELD
from msrnn.core.state import ARCHITECTURE
from msrnn.errors import UsageError
from msrnn.evaluation.batch_size import batch_that_fits
from msrnn.hf.rnn import MultiStateRNN
from msrnn.layer import Record
from msrnn.policy import Policy

FORMAT = 1  # of trace files


@dataclass(frozen=True)
class Trace:
    """When each token is evicted from each bounded layer."""

    evicted_at: Tensor  # [B, bounded layers, G, T]: the last input column that sees the token; T: held; -1: padding
    layers: tuple[int, ...]  # the model's own indices of the bounded layers

    def seen_at(self, column: int) -> Tensor:
        """[B, layers, G, T]: which tokens the query at a column attends to."""
        tokens = torch.arange(self.evicted_at.shape[-1], device=self.evicted_at.device)
        return (tokens <= column) & (column <= self.evicted_at)


def trace(
    rnn: MultiStateRNN,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    on_block: Callable[[int], None] | None = None,
) -> Trace:
    """Read the tokens [B, T] from an empty state and record when each one is evicted from each layer.

    If layers differ in their number of groups, a layer of one group repeats it. `on_block` gets the number of columns
    of each block after it is read.
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

    rnn.read(input_ids, rnn.state(batch_size), attention_mask, last_only=True, on_block=on_block, record=record)
    for i in layers:
        shape, bound = rnn.spec.shapes[i], rnn.spec.bounds[i]
        if shape and shape.shards and bound and bound.policy.per == "head":  # each process has groups of its own
            times[i] = shape.shards.gather(times[i].to(shape.device), 1).cpu()
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


class ChunkTrace(NamedTuple):
    """The trace of one chunk of text without padding, as arrays."""

    evicted_at: NDArray[numpy.int32]  # [L, G, T]: the last step that sees each token; T: never evicted
    layers: tuple[int, ...]  # the model's own indices
    sizes: tuple[int, ...]  # tokens that each of these layers may keep; sliding layers have their own


def trace_chunks(
    rnn: MultiStateRNN, chunks: ArrayLike, on_tokens: Callable[[int], object] | None = None
) -> list[ChunkTrace]:
    """Trace chunks of token ids [N, T] as one batch."""
    rows = torch.from_numpy(numpy.asarray(chunks).astype(numpy.int64))

    def on_block(columns: int) -> None:
        if on_tokens:
            on_tokens(columns * len(rows))

    traced = trace(rnn, rows, on_block=on_block)
    bounds = [rnn.spec.bounds[layer] for layer in traced.layers]
    sizes = tuple(bound.size for bound in bounds if bound)
    return [ChunkTrace(times.numpy(), traced.layers, sizes) for times in traced.evicted_at]


def stored_cells(folder: Path) -> list[tuple[str, int]]:
    """The policies and sizes of the traces in a folder, of any model and text, by their file names."""
    cells: dict[tuple[str, int], None] = {}
    for path in sorted(folder.glob("*-*-*.npz")):
        name, size, _ = path.name.rsplit("-", 2)
        with suppress(ValueError):  # not a trace file
            cells[Policy.parse(name).name, int(size)] = None
    return list(cells)


class TraceStore:
    """A folder of traces, one file per chunk, for one model under one policy and size.

    A trace is identified by the model's weights, the dtype, the policy's numbers, the size and the tokens; not by the
    machine or the batch it was computed in. `beside` is recorded in the files, and does not identify them.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        policy: str | Policy,
        size: int,
        beside: dict[str, Any] | None = None,
    ) -> None:
        self.policy = policy if isinstance(policy, Policy) else Policy.parse(policy)
        self.folder, self.size, self.beside = folder, size, beside or {}
        self.rnn = MultiStateRNN(model, self.policy, size)
        identity = {name: value for name, value in self.rnn.spec.fingerprint.items() if name != ARCHITECTURE}
        self.key = {"format": FORMAT, **identity, "numbers": self.policy.numbers}

    @property
    def label(self) -> str:
        return f"{self.policy.name} {self.size}"

    def path(self, ids: ArrayLike) -> Path:
        """The file of the trace of these tokens [T], whether it exists or not."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode())
        digest.update(numpy.asarray(ids, dtype="<i8").tobytes())
        return self.folder / f"{self.policy.name}-{self.size}-{digest.hexdigest()[:16]}.npz"

    def missing(self, chunks: ArrayLike) -> list[int]:
        """The indices of the chunks [N, T] that have no trace yet."""
        return [i for i, ids in enumerate(numpy.asarray(chunks)) if not self.path(ids).exists()]

    def fill(self, chunks: ArrayLike, batch: int = 1, on_tokens: Callable[[int], object] | None = None) -> None:
        """Trace the chunks of token ids [N, T] that have no trace yet, `batch` at once.

        Each file is written whole, after its batch: an interruption loses only the batch that was being read.
        """
        chunks = numpy.asarray(chunks)
        missing = self.missing(chunks)
        self.folder.mkdir(parents=True, exist_ok=True)
        description = {"key": self.key, "beside": self.beside}
        for start in range(0, len(missing), batch):
            some = missing[start : start + batch]
            for i, one in zip(some, self._trace_batch(chunks[some], on_tokens), strict=True):
                write_atomically(self.path(chunks[i]), partial(_write, one, description))

    def _trace_batch(self, chunks: NDArray[Any], on_tokens: Callable[[int], object] | None) -> list[ChunkTrace]:
        with batch_that_fits(len(chunks), self.label):
            return trace_chunks(self.rnn, chunks, on_tokens)

    def load(self, ids: ArrayLike) -> ChunkTrace:
        """The stored trace of one chunk [T]."""
        path = self.path(ids)
        trace, description = _read(path)
        if description.get("key") != self.key:
            raise UsageError(f"{path}: a trace of another model, policy, size or dtype; delete it to compute it again")
        return trace


def _write(one: ChunkTrace, description: dict[str, Any], path: Path) -> None:
    """Store how many steps each token stays after its own, in the smallest integer type that fits."""
    length = one.evicted_at.shape[-1]
    after = (one.evicted_at - numpy.arange(length)).astype(numpy.uint16 if length < 2**16 else numpy.uint32)
    about = json.dumps({**description, "layers": one.layers, "sizes": one.sizes})
    with path.open("wb") as file:
        numpy.savez_compressed(file, after=after, about=numpy.array(about))


def _read(path: Path) -> tuple[ChunkTrace, dict[str, Any]]:
    try:
        with numpy.load(path, allow_pickle=False) as file:
            after, about = file["after"].astype(numpy.int32), json.loads(str(file["about"]))
        times = after + numpy.arange(after.shape[-1], dtype=numpy.int32)
        return ChunkTrace(times, tuple(about["layers"]), tuple(about["sizes"])), about
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: truncated, or not a trace; delete it to compute it again") from error
