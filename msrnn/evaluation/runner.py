"""Run an evaluation task: compute the cells of a table that a store does not have yet.

Each record is appended to the store as soon as it is computed, so that an interruption costs what is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol

import torch.distributed as dist
from transformers import PreTrainedModel

from msrnn.core.device_memory import is_out_of_memory, release
from msrnn.errors import UsageError
from msrnn.evaluation.batch_size import batch_that_fits
from msrnn.evaluation.cells import find_cells
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.task import C, Item, Job, OnTokens, Result, Task


class Progress(NamedTuple):
    """Callbacks of a run."""

    total: Callable[[int], object] = lambda _: None  # tokens that are still to be read
    cell: Callable[[Any], object] = lambda _: None  # the cell that is computed next
    tokens: OnTokens = lambda _: None  # tokens that were read since the last call
    resumed: Callable[[int, int, str], object] = lambda *_: None  # items done, all items, and what they are
    note: Callable[[str], object] = lambda _: None  # a remark on the data or the model
    cells: Callable[[list[Any]], object] = lambda _: None  # all cells of the table, before the first is computed


class Message(NamedTuple):
    """Progress of another process on a cell."""

    cell: Any
    record: Record | None  # None: it begins
    tokens: int  # that were read since the message before


class Workers(Protocol):
    """Other processes that compute cells, each on a device of this type."""

    @property
    def device(self) -> str: ...

    def compute_cells(self, run: Runner[Any, Any, Any], missing: dict[Any, list[Any]]) -> Iterator[Message]: ...


class Runner(Generic[C, Item, Result]):
    """Computes cells x items of one task, and reads results of earlier runs by their key.

    model    what computes; None: the task needs no model
    batch    items that are computed at once; None: as many as suit the device, and fewer where they do not fit
    workers  other processes, which load the model themselves; None: this process computes
    """

    def __init__(
        self,
        task: Task[C, Item, Result],
        store: Store,
        model: PreTrainedModel | None = None,
        batch: int | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.task, self.store, self.model, self.given_batch, self.workers = task, store, model, batch, workers
        device = workers.device if workers else model.device.type if model else "cpu"
        self.batch = batch or (task.gpu_batch if device == "cuda" else task.cpu_batch)
        # Processes that share a model would not all run out of memory, so none of them may halve its batch.
        self.shrinks = batch is None and task.shrinks and not _shares_model()
        self.metadata = {**task.metadata, **({} if model is None else {"batch": self.batch})}

    @property
    def facts(self) -> Record:
        """The identity of the results, and how they were computed."""
        return {**self.task.key, **self.metadata}

    def results(self, cells: Sequence[C], progress: Progress | None = None) -> dict[C, list[Result]]:
        """The results of every cell, by item; computes what the store does not have."""
        self.run(cells, progress or Progress())
        return {cell: self._read_results(cell) for cell in cells}

    def other_results(self, cells: Sequence[C]) -> dict[C, list[Result]]:
        """The results of all other cells that the store has in full, with the same key and items."""
        found = {}
        for cell in find_cells(self.store.matching(self.task.key), self.task.cell_of):
            known = self.task.read(self.records([cell]))
            if cell not in cells and self.task.items(cell) and not self._find_missing(cell, known):
                found[cell] = [known[item] for item in self.task.items(cell)]
        return found

    def records(self, cells: Sequence[C]) -> list[Record]:
        """All stored records of these cells, oldest first within each cell."""
        return [record for cell in cells for record in self.store.matching(self.task.record_key(cell))]

    @property
    def other_records(self) -> int:
        """The number of records in the store with another key."""
        return len(self.store.records) - len(self.store.matching(self.task.key))

    def run(self, cells: Sequence[C], progress: Progress) -> None:
        """Compute what is missing of these cells, and of those that they need."""
        ordered = dict.fromkeys(one for cell in cells for one in (*self.task.needs(cell), cell))
        progress.cells(list(cells))
        missing = {cell: self.missing(cell) for cell in ordered}
        progress.resumed(*self._count_done(missing), self.task.unit)
        left = {cell: items for cell, items in missing.items() if items}
        progress.total(sum(self.task.work(self._job(cell, items)) for cell, items in left.items()))
        if self.workers is None:
            self._compute_here(left, progress)
        else:
            self._compute_elsewhere(self.workers, left, progress)
        self.task.finish()

    def missing(self, cell: C) -> list[Item]:
        """The items that are not computed yet."""
        return self._find_missing(cell, self.task.read(self.find_done(cell)))

    def find_done(self, cell: C) -> list[Record]:
        """The records of a cell that need not be computed again."""
        return self.store.find_done(self.task.record_key(cell))

    def compute_items(self, cell: C, items: list[Item], on_tokens: OnTokens) -> Iterator[Record]:
        """Compute items; each record is in the store when it is returned."""
        batch = self.batch
        while items:
            batch = min(batch, len(items))
            items = yield from self._compute_batches(self._job(cell, items, batch), on_tokens)
            batch //= 2

    def _compute_here(self, missing: dict[C, list[Item]], progress: Progress) -> None:
        for cell, items in missing.items():
            progress.cell(cell)
            for _ in self.compute_items(cell, items, progress.tokens):
                pass
            release()

    def _compute_elsewhere(self, workers: Workers, missing: dict[C, list[Item]], progress: Progress) -> None:
        for cell, record, tokens in workers.compute_cells(self, missing):
            if record is None:
                progress.cell(cell)
            else:
                self.store.append(record)
                self.metadata.update({name: record[name] for name in (*self.metadata, "gpu") if name in record})
            progress.tokens(tokens)

    def _compute_batches(self, job: Job[C, Item], on_tokens: OnTokens) -> Generator[Record, None, list[Item]]:
        """Compute and store items; returns those that did not fit into memory, and may fit in a smaller batch."""
        counted = list[int]()

        def count(tokens: int) -> None:
            counted.append(tokens)
            on_tokens(tokens)

        if not self.shrinks or job.batch == 1:
            with batch_that_fits(job.batch, job.cell.label):
                yield from self._append_records(job, count)
            return []
        try:
            yield from self._append_records(job, count)
            return []
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        release()
        left = self.missing(job.cell)
        on_tokens(self.task.work(job) - self.task.work(self._job(job.cell, left)) - sum(counted))
        return left

    def _append_records(self, job: Job[C, Item], on_tokens: OnTokens) -> Iterator[Record]:
        key = self.task.record_key(job.cell)
        compute = self.task.prepare(job, self.model)
        for some in self.task.batches(job):
            for fields in compute(some, on_tokens):
                if self.task.record_key(job.cell) != key:  # which file this result is of is not known
                    raise UsageError(f"{job.cell.label}: a file of this policy was changed meanwhile; run it again")
                record = {**key, **fields, **self.metadata}
                self.store.append(record)
                yield record

    def _job(self, cell: C, items: list[Item], batch: int | None = None) -> Job[C, Item]:
        return Job(cell, items, batch or self.batch, self.find_done)

    def _find_missing(self, cell: C, known: dict[Item, Result]) -> list[Item]:
        items = dict.fromkeys(self.task.items(cell))
        return [item for item in items if item not in known or not self.task.complete(known[item])]

    def _count_done(self, missing: dict[C, list[Item]]) -> tuple[int, int]:
        """How much needs no more work, of how much, in the unit of the task."""
        every = {cell: list(dict.fromkeys(self.task.items(cell))) for cell in missing}
        total = sum(self.task.count(Job(cell, items, self.batch, lambda _: [])) for cell, items in every.items())
        left = sum(self.task.count(self._job(cell, items)) for cell, items in missing.items())
        return total - left, total

    def _read_results(self, cell: C) -> list[Result]:
        known = self.task.read(self.records([cell]))
        return [known[item] for item in self.task.items(cell)]


def _shares_model() -> bool:
    """Whether several processes hold parts of one model."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
