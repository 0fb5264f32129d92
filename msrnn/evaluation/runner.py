"""Run an evaluation: compute the cells of a table that a store does not have yet.

Each row is appended to the store as soon as it is computed, so that an interruption costs what is under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch.distributed as dist
from transformers import PreTrainedModel

from msrnn.core.device_memory import is_out_of_memory, release
from msrnn.errors import UsageError
from msrnn.evaluation.batch_size import batch_that_fits
from msrnn.evaluation.cells import stored_cells
from msrnn.evaluation.environment import environment, model_identity
from msrnn.evaluation.store import Row, Store


class AnyCell(Protocol):
    """One row and column of a table: a policy, a size, and whatever else a task varies."""

    @property
    def label(self) -> str: ...

    @property
    def key(self) -> Row: ...

    def __hash__(self) -> int: ...


C = TypeVar("C", bound=AnyCell)
Item = TypeVar("Item", bound=Hashable)
Result = TypeVar("Result")
OnTokens = Callable[[int], object]
Compute = Callable[[list[Item], OnTokens], Iterable[Row]]


class Progress(NamedTuple):
    """Callbacks of a run."""

    total: Callable[[int], object] = lambda _: None  # tokens that are still to be read
    cell: Callable[[Any], object] = lambda _: None  # the cell that is computed next
    tokens: OnTokens = lambda _: None  # tokens that were read since the last call
    resumed: Callable[[int, int, str], object] = lambda *_: None  # items done, all items, and what they are


class Runner(ABC, Generic[C, Item, Result]):
    """Computes cells x items of one task. Results of earlier runs are reused by their key.

    key       what identifies a result, together with its cell and item: the model's weights, its dtype, …
    metadata  written into every row, identifies nothing
    batch     items that are computed at once, at most
    shrinks   whether a batch that does not fit into memory is halved; else it is refused
    """

    unit: str  # the name of what `done_of` counts

    def __init__(self, store: Store, key: Row, metadata: Row, batch: int, shrinks: bool = False) -> None:
        self.store, self.key, self.metadata, self.batch, self.shrinks = store, key, metadata, batch, shrinks

    @abstractmethod
    def items(self, cell: C) -> list[Item]:
        """What is computed for a cell, by key."""

    @abstractmethod
    def read(self, rows: list[Row]) -> dict[Item, Result]:
        """The results in the rows of one cell; of several for one item, the newest."""

    @abstractmethod
    def work(self, cell: C, items: list[Item]) -> int:
        """Tokens that are read to compute these items."""

    @abstractmethod
    def prepare(self, cell: C, items: list[Item], batch: int) -> Compute[Item]:
        """Load what a cell needs. The function that is returned computes some items and yields fields of their rows."""

    def complete(self, result: Result) -> bool:
        """Whether an item needs no more work."""
        return True

    def batches(self, cell: C, items: list[Item], batch: int) -> list[list[Item]]:
        """The items of each call of the function that `prepare` returns."""
        return [items[start : start + batch] for start in range(0, len(items), batch)]

    def row_key(self, cell: C) -> Row:
        """What identifies the rows of a cell."""
        return {**cell.key, **self.key}

    def run(self, cells: Sequence[C], progress: Progress) -> None:
        missing = {cell: self.missing(cell) for cell in cells}
        progress.resumed(*self.done_of(missing), self.unit)
        progress.total(sum(self.work(cell, items) for cell, items in missing.items() if items))
        self.compute_all({cell: items for cell, items in missing.items() if items}, progress)

    def compute_all(self, missing: dict[C, list[Item]], progress: Progress) -> None:
        """Compute these items of each cell."""
        for cell, items in missing.items():
            progress.cell(cell)
            for _ in self.computed(cell, items, progress.tokens):
                pass
            release()

    def missing(self, cell: C) -> list[Item]:
        """The items that are not computed yet."""
        return self._missing(cell, self.read(self.store.done(self.row_key(cell))))

    def _missing(self, cell: C, known: dict[Item, Result]) -> list[Item]:
        items = dict.fromkeys(self.items(cell))
        return [item for item in items if item not in known or not self.complete(known[item])]

    def done_of(self, missing: dict[C, list[Item]]) -> tuple[int, int]:
        """How many items need no more work, of how many."""
        total = sum(len(dict.fromkeys(self.items(cell))) for cell in missing)
        return total - sum(len(items) for items in missing.values()), total

    def computed(self, cell: C, items: list[Item], on_tokens: OnTokens) -> Iterator[Row]:
        """Compute items; each row is in the store when it is returned."""
        batch = self.batch
        while items:
            batch = min(batch, len(items))
            items = yield from self._append(cell, items, batch, on_tokens)
            batch //= 2

    def _append(self, cell: C, items: list[Item], batch: int, on_tokens: OnTokens) -> Generator[Row, None, list[Item]]:
        """Compute and store items; returns those that did not fit into memory, and may fit in a smaller batch."""
        counted = list[int]()

        def count(tokens: int) -> None:
            counted.append(tokens)
            on_tokens(tokens)

        def append() -> Iterator[Row]:
            compute = self.prepare(cell, items, batch)
            for some in self.batches(cell, items, batch):
                for fields in compute(some, count):
                    row = {**self.row_key(cell), **fields, **self.metadata}
                    self.store.append(row)
                    yield row

        if not self.shrinks or batch == 1:
            with batch_that_fits(batch, cell.label):
                yield from append()
            return []
        try:
            yield from append()
            return []
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        release()
        left = self.missing(cell)
        on_tokens(self.work(cell, items) - self.work(cell, left) - sum(counted))
        return left


class Computed(NamedTuple):
    """What another process has done for a cell."""

    cell: Any
    row: Row | None  # None: it begins
    tokens: int  # that were read since the row before


class Workers(Protocol):
    """Other processes that compute cells, each on a device of this type."""

    @property
    def device(self) -> str: ...

    def computed(self, run: ModelRunner[Any, Any, Any], missing: dict[Any, list[Any]]) -> Iterator[Computed]: ...


class ModelRunner(Runner[C, Item, Result]):
    """A run that needs a model: in this process, or in others that load the same model.

    batch  None: as many items at once as suit the device, and fewer where they do not fit
    """

    gpu_batch, cpu_batch = 1, 1  # items at once, where no batch is given
    workers: Workers | None = None  # who computes the cells; None: this process, one after another

    def __init__(self, model: PreTrainedModel, store: Store, key: Row, metadata: Row, batch: int | None) -> None:
        self._given = batch
        super().__init__(store, key, metadata, 1, shrinks=batch is None)
        self._use(model)

    def _use(self, model: PreTrainedModel) -> None:
        self.model = model
        self._set_batch(model.device.type)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.shrinks = False  # processes that share a model would not all run out of memory

    def _set_batch(self, device: str) -> None:
        self.batch = self._given or (self.gpu_batch if device == "cuda" else self.cpu_batch)
        self.metadata = {**self.metadata, "batch": self.batch}

    def leave_to(self, workers: Workers | None) -> None:
        """Let others compute; None: this process does."""
        self.workers = workers
        self._set_batch(workers.device if workers else self.model.device.type)

    def needs(self, cell: C) -> list[C]:
        """Other cells whose rows this one is computed from."""
        return []

    def compute_all(self, missing: dict[C, list[Item]], progress: Progress) -> None:
        if self.workers is None:
            return super().compute_all(missing, progress)
        for cell, row, tokens in self.workers.computed(self, missing):
            if row is None:
                progress.cell(cell)
            else:
                self.store.append(row)
                self.metadata.update({name: row[name] for name in (*self.metadata, "gpu") if name in row})
            progress.tokens(tokens)
        return None

    def sent(self) -> Self:
        """A copy for another process, without the model and without rows."""
        other = copy(self)
        other.store, other.workers = Store(None), None
        del other.model
        return other

    def received(self, model: PreTrainedModel, rows: list[Row]) -> Self:
        """Such a copy in the other process, with the model and the rows that its work needs."""
        found = model_identity(model)
        for name in ("fingerprint", "dtype"):
            if found[name] != self.key[name]:
                raise UsageError(
                    f"a worker's model has {name} {found[name]} instead of {self.key[name]}: give all machines the "
                    "same model, and --dtype"
                )
        run = copy(self)
        run.store = Store(None)
        run.store.rows = rows
        run.metadata = {**self.metadata, **environment(model.device), "backend": found["backend"]}
        run._use(model)
        return run


class Evaluation(ModelRunner[C, Item, Result]):
    """A run whose results are read back by cell; of earlier commands, too."""

    @property
    def other_rows(self) -> int:
        """Rows of the store with another key."""
        return len(self.store.rows) - len(self.store.matching(self.key))

    @abstractmethod
    def cell_of(self, row: Row) -> C:
        """The cell that a row belongs to."""

    def results(self, cells: Sequence[C], progress: Progress | None = None) -> dict[C, list[Result]]:
        """The results of every cell, by item; computes what the store does not have."""
        self.run(cells, progress or Progress())
        return {cell: self._stored(cell) for cell in cells}

    def others(self, cells: Sequence[C]) -> dict[C, list[Result]]:
        """The results of all other cells that the store has in full, with the same key and items."""
        results = {}
        for cell in stored_cells(self.store.matching(self.key), self.cell_of):
            known = self.read(self.store.matching(self.row_key(cell)))
            if cell not in cells and self.items(cell) and not self._missing(cell, known):
                results[cell] = [known[item] for item in self.items(cell)]
        return results

    def _stored(self, cell: C) -> list[Result]:
        known = self.read(self.store.matching(self.row_key(cell)))
        return [known[item] for item in self.items(cell)]
