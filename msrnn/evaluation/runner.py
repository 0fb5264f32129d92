"""Run an evaluation: compute the cells of a table that a store does not have yet.

Each row is appended to the store as soon as it is computed, so that an interruption costs what is under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from msrnn.evaluation.batch_size import batch_that_fits, if_it_fits, release
from msrnn.evaluation.cells import stored_cells
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
        missing = {cell: self._missing(cell, self.read(self.store.done(self.row_key(cell)))) for cell in cells}
        progress.resumed(*self.done_of(missing), self.unit)
        progress.total(sum(self.work(cell, items) for cell, items in missing.items() if items))
        for cell, items in missing.items():
            if items:
                progress.cell(cell)
                self._compute(cell, items, progress.tokens)
                release()

    def _missing(self, cell: C, known: dict[Item, Result]) -> list[Item]:
        items = dict.fromkeys(self.items(cell))
        return [item for item in items if item not in known or not self.complete(known[item])]

    def done_of(self, missing: dict[C, list[Item]]) -> tuple[int, int]:
        """How many items need no more work, of how many."""
        total = sum(len(dict.fromkeys(self.items(cell))) for cell in missing)
        return total - sum(len(items) for items in missing.values()), total

    def _compute(self, cell: C, items: list[Item], on_tokens: OnTokens) -> None:
        batch = self.batch
        while items:
            batch = min(batch, len(items))
            items = self._append(cell, items, batch, on_tokens)
            batch //= 2

    def _append(self, cell: C, items: list[Item], batch: int, on_tokens: OnTokens) -> list[Item]:
        """Compute and store items; returns those that did not fit into memory, and may fit in a smaller batch."""
        counted = list[int]()

        def count(tokens: int) -> None:
            counted.append(tokens)
            on_tokens(tokens)

        def append() -> bool:
            compute = self.prepare(cell, items, batch)
            for some in self.batches(cell, items, batch):
                for fields in compute(some, count):
                    self.store.append({**self.row_key(cell), **fields, **self.metadata})
            return True

        if not self.shrinks or batch == 1:
            with batch_that_fits(batch, cell.label):
                append()
            return []
        if if_it_fits(append):
            return []
        left = self._missing(cell, self.read(self.store.done(self.row_key(cell))))
        on_tokens(self.work(cell, items) - self.work(cell, left) - sum(counted))
        return left


class Evaluation(Runner[C, Item, Result]):
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
            if cell not in cells and not self._missing(cell, known):
                results[cell] = [known[item] for item in self.items(cell)]
        return results

    def _stored(self, cell: C) -> list[Result]:
        known = self.read(self.store.matching(self.row_key(cell)))
        return [known[item] for item in self.items(cell)]
