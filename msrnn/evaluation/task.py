"""The contract of an evaluation task: which cells and items it has, and how a model computes them.

A task holds neither a model nor a store: `msrnn.evaluation.runner.Runner` brings the two together. So a task can be
sent to another process as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from msrnn.evaluation.store import Record


class AnyCell(Protocol):
    """One row and column of a table: a policy, a size, and whatever else a task varies."""

    @property
    def label(self) -> str: ...

    @property
    def key(self) -> Record: ...

    def __hash__(self) -> int: ...


C = TypeVar("C", bound=AnyCell)
Item = TypeVar("Item", bound=Hashable)
Result = TypeVar("Result")
OnTokens = Callable[[int], object]
Compute = Callable[[list[Item], OnTokens], Iterable[Record]]


@dataclass(frozen=True)
class Job(Generic[C, Item]):
    """Items of a cell that are to be computed."""

    cell: C
    items: list[Item]
    batch: int  # items at once, at most
    done: Callable[[C], list[Record]]  # the records of a cell that need not be computed again


class Task(Protocol[C, Item, Result]):
    """The work of one evaluation.

    key       identifies its results, together with cell and item: the model's weights, its dtype, …
    metadata  written into every record, identifies nothing
    unit      the name of what `count` counts
    """

    key: Record
    metadata: Record
    unit: str
    gpu_batch: int = 1  # items at once, where no batch is given
    cpu_batch: int = 1
    shrinks: bool = True  # whether a batch that nobody asked for may be halved, if it does not fit into memory

    def items(self, cell: C) -> list[Item]:
        """The keys of the items of a cell."""
        ...

    def read(self, records: list[Record]) -> dict[Item, Result]:
        """The results in the records of one cell; of several for one item, the newest."""
        ...

    def work(self, job: Job[C, Item]) -> int:
        """Tokens that are read to compute a job."""
        ...

    def prepare(self, job: Job[C, Item], model: Any) -> Compute[Item]:
        """Load what a cell needs. The function that is returned computes items and yields fields of their records."""
        ...

    def cell_of(self, record: Record) -> C:
        """The cell that a record belongs to."""
        ...

    def record_key(self, cell: C) -> Record:
        """The fields that identify the records of a cell."""
        return {**cell.key, **self.key}

    def complete(self, result: Result) -> bool:
        """Whether an item needs no more work."""
        return True

    def batches(self, job: Job[C, Item]) -> list[list[Item]]:
        """The items of each call of the function that `prepare` returns."""
        return [job.items[start : start + job.batch] for start in range(0, len(job.items), job.batch)]

    def count(self, job: Job[C, Item]) -> int:
        """How much work a job is, in `unit`: what users are told about a run that is resumed."""
        return len(job.items)

    def needs(self, cell: C) -> list[C]:
        """Other cells whose records this one is computed from."""
        return []

    def finish(self) -> None:
        """Called after a run that was not interrupted."""
        return
