"""Traces on disk: one small file per chunk, known by everything that decides what is in it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import PreTrainedModel

from msrnn.analysis.trace import trace
from msrnn.core.state_file import write_atomically
from msrnn.errors import UsageError
from msrnn.evaluation.batch_size import batch_that_fits
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import Policy

FORMAT = 1

Times = NDArray[numpy.int32]  # [L, G, T]: the last step that saw each token; T: never dropped


class Traced(NamedTuple):
    """When every token of one chunk left every bounded layer."""

    evicted_at: Times
    layers: tuple[int, ...]  # the model's own indices
    sizes: tuple[int, ...]  # states that each of these layers may hold; sliding layers have their own


def traced(rnn: MultiStateRNN, chunks: ArrayLike, on_tokens: Callable[[int], object] | None = None) -> list[Traced]:
    """Of chunks of token ids [N, T], read as one batch."""
    rows = torch.from_numpy(numpy.asarray(chunks).astype(numpy.int64))

    def on_block(columns: int) -> None:
        if on_tokens:
            on_tokens(columns * len(rows))

    found = trace(rnn, rows, on_block=on_block)
    bounds = [rnn.spec.bounds[layer] for layer in found.layers]
    sizes = tuple(bound.size for bound in bounds if bound)
    return [Traced(times.numpy(), found.layers, sizes) for times in found.evicted_at]


def stored_cells(folder: Path) -> list[tuple[str, int]]:
    """The policies and sizes of the traces in a folder, of whatever model and text, by the names of their files."""
    found: dict[tuple[str, int], None] = {}
    for path in sorted(folder.glob("*-*-*.npz")):
        name, size, _ = path.name.rsplit("-", 2)
        with suppress(ValueError):  # no name of ours
            found[Policy.parse(name).name, int(size)] = None
    return list(found)


class Traces:
    """A folder of traces, and one model under one policy and size.

    They are found again by the model's weights, the dtype, the policy's numbers, the size and the tokens alone: where
    they were computed, and in which batches, makes no other file.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        policy_: str | Policy,
        size: int,
        beside: dict[str, Any] | None = None,
    ) -> None:
        self.policy = policy_ if isinstance(policy_, Policy) else Policy.parse(policy_)
        self.folder, self.size, self.beside = folder, size, beside or {}
        self.rnn = MultiStateRNN(model, self.policy, size)
        self.key = {"format": FORMAT, **self.rnn.spec.fingerprint, "numbers": asdict(self.policy)}

    @property
    def label(self) -> str:
        return f"{self.policy.name} {self.size}"

    def path(self, ids: ArrayLike) -> Path:
        """Where the trace of these tokens [T] lies, or would lie."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode())
        digest.update(numpy.asarray(ids, dtype="<i8").tobytes())
        return self.folder / f"{self.policy.name}-{self.size}-{digest.hexdigest()[:16]}.npz"

    def missing(self, chunks: ArrayLike) -> list[int]:
        """Which of the chunks [N, T] have no trace yet."""
        return [i for i, ids in enumerate(numpy.asarray(chunks)) if not self.path(ids).exists()]

    def fill(self, chunks: ArrayLike, batch: int = 1, on_tokens: Callable[[int], object] | None = None) -> None:
        """Trace those of the chunks of token ids [N, T] that have no trace yet.

        Files appear whole, as soon as they are computed: an interruption costs the batch that was being read.
        """
        chunks = numpy.asarray(chunks)
        missing = self.missing(chunks)
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"key": self.key, "beside": self.beside}
        for start in range(0, len(missing), batch):
            some = missing[start : start + batch]
            for i, one in zip(some, self._together(chunks[some], on_tokens), strict=True):
                write_atomically(self.path(chunks[i]), partial(_write, one, about))

    def _together(self, chunks: NDArray[Any], on_tokens: Callable[[int], object] | None) -> list[Traced]:
        with batch_that_fits(len(chunks), self.label):
            return traced(self.rnn, chunks, on_tokens)

    def load(self, ids: ArrayLike) -> Traced:
        """The trace of one chunk [T], which must be there."""
        path = self.path(ids)
        found, about = _read(path)
        if about.get("key") != self.key:
            raise UsageError(f"{path}: the trace of another model, policy, size or dtype; delete it to compute it anew")
        return found


def _write(one: Traced, about: dict[str, Any], path: Path) -> None:
    """Steps from birth on, as the smallest integers that hold them."""
    length = one.evicted_at.shape[-1]
    after = (one.evicted_at - numpy.arange(length)).astype(numpy.uint16 if length < 2**16 else numpy.uint32)
    told = json.dumps({**about, "layers": one.layers, "sizes": one.sizes})
    with path.open("wb") as file:
        numpy.savez_compressed(file, after=after, about=numpy.array(told))


def _read(path: Path) -> tuple[Traced, dict[str, Any]]:
    try:
        with numpy.load(path, allow_pickle=False) as file:
            after, about = file["after"].astype(numpy.int32), json.loads(str(file["about"]))
        times = after + numpy.arange(after.shape[-1], dtype=numpy.int32)
        return Traced(times, tuple(about["layers"]), tuple(about["sizes"])), about
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: truncated, or not a trace; delete it to compute it anew ({error})") from error
