"""The runner on a task whose model does nothing: an item is a number, and its result is its square."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn.errors import UsageError
from msrnn.evaluation.cells import Cell, cell_of
from msrnn.evaluation.runner import Progress, Runner
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.task import Compute, Job, OnTokens, Task

CELLS = [Cell("full", None), Cell("tova", 8)]


class Squares(Task[Cell, int, int]):
    unit = "numbers"

    def __init__(self, numbers: list[int], fits: int = 9) -> None:
        self.key, self.metadata = {"model": "a"}, {"commit": "b"}
        self.numbers, self.fits, self.tried = numbers, fits, list[list[int]]()

    def cell_of(self, row: Record) -> Cell:
        return cell_of(row)

    def items(self, cell: Cell) -> list[int]:
        return self.numbers

    def read(self, records: list[Record]) -> dict[int, int]:
        return {n: square for one in records for n, square in zip(one["items"], one["squares"], strict=True)}

    def work(self, job: Job[Cell, int]) -> int:
        return 10 * len(job.items)

    def prepare(self, job: Job[Cell, int], model: Any) -> Compute[int]:
        def compute(batch: list[int], on_tokens: OnTokens) -> Iterator[Record]:
            self.tried.append(batch)
            on_tokens(10 * len(batch))
            if len(batch) > self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            if 99 in batch:
                raise KeyboardInterrupt
            yield {"items": batch, "squares": [n * n for n in batch]}

        return compute


def run(
    task: Squares,
    store: Store | None = None,
    cells: list[Cell] = CELLS,
    batch: int = 2,
    progress: Progress | None = None,
) -> dict[Cell, list[int]]:
    return Runner(task, store or Store(None), batch=batch).results(cells, progress)


def test_records_have_the_key_of_their_cell_and_the_metadata() -> None:
    store = Store(None)
    assert run(Squares([1, 2, 3]), store) == {cell: [1, 4, 9] for cell in CELLS}
    assert [record["items"] for record in store.records] == [[1, 2], [3]] * 2
    assert all(record["commit"] == "b" and record["model"] == "a" for record in store.records)
    assert [cell_of(record) for record in store.records[::2]] == CELLS


def test_a_policy_that_changes_meanwhile_is_refused() -> None:
    """Its file is written anew while the second batch is computed: what that would be stored as is not known."""

    class Changing(Squares):
        def record_key(self, cell: Cell) -> Record:
            return {**super().record_key(cell), "content": len(self.tried) > 1}

    store = Store(None)
    with pytest.raises(UsageError, match="a file of this policy was changed meanwhile; run it again"):
        run(Changing([1, 2, 3]), store)
    assert [record["items"] for record in store.records] == [[1, 2]]


def test_an_interruption_costs_one_batch(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(Squares([1, 2, 3, 99]), Store(path))
    heard = list[object]()
    again = Squares([1, 2, 3, 4])
    progress = Progress(heard.append, heard.append, resumed=lambda *counts: heard.append(counts))
    assert run(again, Store(path), progress=progress) == {cell: [1, 4, 9, 16] for cell in CELLS}
    assert again.tried == [[3, 4], [1, 2], [3, 4]]
    assert heard == [(2, 8, "numbers"), 60, *CELLS]


def test_with_redo_only_new_records_count_as_done(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    run(Squares([1, 2]), Store(path), CELLS[:1])
    again = Squares([1, 2])
    assert run(again, Store(path, redo=True), CELLS[:1]) == {CELLS[0]: [1, 4]}
    assert again.tried == [[1, 2]]


def test_a_batch_that_does_not_fit_is_halved_for_all_that_follow() -> None:
    counted, squares = list[int](), Squares([1, 2, 3, 4, 5, 6, 7], fits=2)
    squares.cpu_batch = 4
    results = Runner(squares, Store(None)).results(CELLS[:1], Progress(tokens=counted.append))
    assert results == {CELLS[0]: [1, 4, 9, 16, 25, 36, 49]}
    assert [len(batch) for batch in squares.tried] == [4, 2, 2, 2, 1]
    assert sum(counted) == 70
    with pytest.raises(ValueError, match="batch=4: full does not fit into memory"):
        run(Squares([1, 2, 3, 4], fits=2), cells=CELLS[:1], batch=4)


def test_a_task_may_refuse_smaller_batches() -> None:
    squares = Squares([1, 2, 3, 4], fits=2)
    squares.cpu_batch, squares.shrinks = 4, False
    with pytest.raises(ValueError, match="batch=4: full does not fit into memory"):
        Runner(squares, Store(None)).results(CELLS[:1])


def test_other_cells_that_are_complete() -> None:
    store = Store(None)
    run(Squares([1, 2]), store)
    run(Squares([1]), store, [Cell("window", 8)])
    runner = Runner(Squares([1, 2]), store)
    assert runner.other_results(CELLS[:1]) == {CELLS[1]: [1, 4]}
    assert runner.records(CELLS[1:]) == store.records[1:2]
    assert runner.other_records == 0
    store.append({**store.records[-1], "model": "b"})
    assert runner.other_records == 1


def test_an_item_that_occurs_twice_is_computed_once() -> None:
    squares = Squares([3, 3, 4])
    assert run(squares, cells=CELLS[:1]) == {CELLS[0]: [9, 9, 16]}
    assert squares.tried == [[3, 4]]


class Sums(Squares):
    """A bounded cell adds what the full one has."""

    def needs(self, cell: Cell) -> list[Cell]:
        return [] if cell == CELLS[0] else [CELLS[0]]

    def prepare(self, job: Job[Cell, int], model: Any) -> Compute[int]:
        full = self.read(job.done(CELLS[0])) if self.needs(job.cell) else {}

        def compute(batch: list[int], on_tokens: OnTokens) -> Iterator[Record]:
            yield {"items": batch, "squares": [n * n + full.get(n, 0) for n in batch]}

        return compute


def test_cells_that_others_need_are_computed_first() -> None:
    store = Store(None)
    assert run(Sums([1, 2]), store, CELLS[1:]) == {CELLS[1]: [2, 8]}
    assert [cell_of(record) for record in store.records] == CELLS
