"""All cells on all chunks, each batch of chunks a row of a store: what is there already is not computed again."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from msrnn.evaluation.cells import Cell, stored_cells
from msrnn.evaluation.chunks import Data
from msrnn.evaluation.memory import batch_that_fits, if_it_fits, release
from msrnn.evaluation.perplexity.reading import Reader
from msrnn.evaluation.rows import fields, listed, number, optional, paired, text, whole
from msrnn.evaluation.store import Row, Store
from msrnn.evaluation.watch import Watch
from msrnn.policy import FULL

MANY = 64  # chunks at once on a GPU, whose scan walks as many as it has multiprocessors in the time of one
CHECK = paired(
    "chunks",
    "nll",
    fields(policy=text, size=optional(whole), chunks=listed(text), nll=listed(number), fingerprint=text, dtype=text),
)
Results = dict[Cell, list[float]]  # each chunk's summed negative log-likelihood, in the order of the chunks


class Run:
    """One model on one choice of chunks. `beside` is written into every row, and tells no results apart.

    So many chunks are read at once as `batch` says; None: as many as suit the device, fewer where they do not fit.
    """

    def __init__(
        self, model: PreTrainedModel, data: Data, store: Store, batch: int | None, beside: dict[str, Any]
    ) -> None:
        self.model, self.data, self.store = model, data, store
        self.batch, self.shrinks = batch or (MANY if model.device.type == "cuda" else 1), batch is None
        plan = Reader(model, Cell(FULL, None), len(data.opening)).rnn.spec
        self.key = {"fingerprint": plan.fingerprint["model"], "dtype": plan.fingerprint["dtype"]}
        backend = "/".join(sorted(set(plan.backends)))
        self.beside = {"length": data.length, "data": data.fingerprint, "backend": backend, **beside}

    def results(self, cells: list[Cell], watch: Watch | None = None) -> Results:
        """Of every cell; an interruption costs the batch that was being read, and no other."""
        watch = watch or Watch()
        found = {cell: self._values(self.store.done({**cell.key, **self.key})) for cell in cells}
        missing = {cell: [i for i, key in enumerate(self.data.keys) if key not in found[cell]] for cell in cells}
        left, every = sum(len(chunks) for chunks in missing.values()), len(cells) * len(self.data.keys)
        watch.resumed(every - left, every, "chunks")
        watch.total(left * self.data.predicted)
        for cell, chunks in missing.items():
            if chunks:
                watch.cell(cell)
                found[cell].update(self._read(cell, chunks, watch))
                release()
        return {cell: [found[cell][key] for key in self.data.keys] for cell in cells}

    def others(self, cells: list[Cell]) -> Results:
        """The results of all other cells that the store has of the same model, dtype and chunks."""
        found: Results = {}
        for cell in stored_cells(self.store.matching(self.key)):
            values = self._values(self.store.matching({**cell.key, **self.key}))
            if cell not in cells and all(key in values for key in self.data.keys):
                found[cell] = [values[key] for key in self.data.keys]
        return found

    @staticmethod
    def _values(rows: list[Row]) -> dict[str, float]:
        """By the chunks' content, so that another choice of chunks finds those that it shares with an earlier one."""
        return {key: nll for row in rows for key, nll in zip(row["chunks"], row["nll"], strict=True)}

    def _read(self, cell: Cell, chunks: list[int], watch: Watch) -> Iterator[tuple[str, float]]:
        reader, batch = Reader(self.model, cell, len(self.data.opening)), self.batch
        while chunks:
            some, started = chunks[:batch], perf_counter()
            nll = self._nll(reader, some, watch)
            if nll is None:
                batch = len(some) // 2
                continue
            chunks = chunks[len(some) :]
            row = {**cell.key, **self.key, **self._of(some), "nll": nll, "seconds": perf_counter() - started}
            self.store.append({**row, **self.beside})
            yield from zip(row["chunks"], nll, strict=True)

    def _nll(self, reader: Reader, chunks: list[int], watch: Watch) -> list[float] | None:
        """None: fewer might fit."""
        ids, counted = torch.tensor([self.data.chunks[i].ids for i in chunks]), list[int]()

        def on_tokens(count: int) -> None:
            counted.append(count)
            watch.tokens(count)

        if self.shrinks and len(chunks) > 1:
            nll = if_it_fits(lambda: reader.nll(ids, on_tokens))
            if nll is None:
                watch.tokens(-sum(counted))
            return nll
        with batch_that_fits(len(chunks), reader.cell.label):
            return reader.nll(ids, on_tokens)

    def _of(self, chunks: list[int]) -> dict[str, Any]:
        """What a row says of its chunks: their content, and where they are from."""
        return {
            "chunks": [self.data.keys[i] for i in chunks],
            "texts": [[self.data.chunks[i].book, self.data.chunks[i].start] for i in chunks],
            "tokens": self.data.predicted,
        }
