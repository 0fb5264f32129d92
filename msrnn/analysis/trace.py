"""Eviction times on disk: `TraceStore` keeps what `msrnn.hf.trace` computes."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy
from numpy.typing import ArrayLike, NDArray
from transformers import PreTrainedModel

from msrnn.core.atomic import write_atomically
from msrnn.core.fingerprint import ARCHITECTURE
from msrnn.errors import FileError, UsageError
from msrnn.evaluation.batch_size import batch_that_fits
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.trace import ChunkTrace, trace_chunks
from msrnn.policy import Policy
from msrnn.size import Size, joint_name, joint_numbers, parse_policy

FORMAT = 1  # of trace files
LONGEST = 200  # bytes of a policy's name in the name of a trace file: a file of row weights has a path


def find_traced_cells(folder: Path) -> list[tuple[str, int]]:
    """The policies and sizes of the traces in a folder, of any model and text, by their file names."""
    cells: dict[tuple[str, int], None] = {}
    for path in sorted(folder.glob("*-*-*.npz")):
        name, size, _ = unquote(path.name).rsplit("-", 2)
        with suppress(ValueError):  # not a trace file
            cells[joint_name(*parse_policy(name)), int(size)] = None
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
        value, budget = parse_policy(policy)
        self.policy, self.size = joint_name(value, budget), size
        self.folder, self.beside = folder, beside or {}
        self._quoted = self.policy.replace("%", "%25").replace("/", "%2F")
        if len(self._quoted.encode()) > LONGEST:
            problem = f"policy {self.policy!r}: too long for the name of a trace file"
            raise UsageError(problem, advice="use a shorter path of its file")
        self.rnn = MultiStateRNN(model, value, Size(size, budget))
        identity = {name: value for name, value in self.rnn.spec.fingerprint.items() if name != ARCHITECTURE}
        self.key = {"format": FORMAT, **identity, "numbers": joint_numbers(value, budget)}

    @property
    def label(self) -> str:
        return f"{self.policy} {self.size}"

    def path(self, ids: ArrayLike) -> Path:
        """The file of the trace of these tokens [T], whether it exists or not."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode())
        digest.update(numpy.asarray(ids, dtype="<i8").tobytes())
        return self.folder / f"{self._quoted}-{self.size}-{digest.hexdigest()[:16]}.npz"

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
            raise FileError(
                "a trace of another model, policy, size or dtype", path, advice="delete it to compute it again"
            )
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
        raise FileError("truncated, or not a trace", path, advice="delete it to compute it again") from error
