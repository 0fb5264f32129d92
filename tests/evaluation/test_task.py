from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msrnn.evaluation.cells import Cell, cell_of
from msrnn.evaluation.store import Record
from msrnn.evaluation.task import Compute, Job, Task


class Plain(Task[Cell, int, int]):
    """A task that overrides nothing that it need not."""

    key, metadata, unit = {"model": "a"}, {}, "numbers"

    def items(self, cell: Cell) -> list[int]:
        return [1, 2, 3]

    def read(self, records: list[Record]) -> dict[int, int]:
        return {}

    def work(self, job: Job[Cell, int]) -> int:
        return 0

    def prepare(self, job: Job[Cell, int], model: Any) -> Compute[int]:
        def compute(items: list[int], _: Any) -> Iterable[Record]:
            return []

        return compute

    def cell_of(self, record: Record) -> Cell:
        return cell_of(record)


def job(count: int, batch: int) -> Job[Cell, int]:
    return Job(Cell("tova", 8), [*range(count)], batch, lambda _: [])


def test_items_are_computed_in_batches() -> None:
    assert Plain().batches(job(5, 2)) == [[0, 1], [2, 3], [4]]
    assert Plain().batches(job(0, 2)) == []
    assert Plain().count(job(5, 2)) == 5


def test_a_record_is_identified_by_its_cell_and_its_task() -> None:
    found = Plain().record_key(Cell("tova", 8))
    assert found == {**Cell("tova", 8).key, "model": "a"}


def test_a_result_is_complete_and_needs_no_other_cell() -> None:
    task = Plain()
    assert task.complete(0)
    assert task.needs(Cell("tova", 8)) == []
    assert (task.gpu_batch, task.cpu_batch, task.shrinks) == (1, 1, True)
