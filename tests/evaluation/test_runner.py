"""The runner on a task whose model does nothing: an item is a number, and its result is its square."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msrnn.evaluation.cells import Cell, cell_of
from msrnn.evaluation.runner import Compute, Evaluation, OnTokens, Progress
from msrnn.evaluation.store import Row, Store

CELLS = [Cell("full", None), Cell("tova", 8)]


class Squares(Evaluation[Cell, int, int]):
    unit = "numbers"

    def __init__(self, store: Store, numbers: list[int], batch: int = 2, shrinks: bool = False, fits: int = 9) -> None:
        model: Any = SimpleNamespace(device=torch.device("cpu"))
        super().__init__(model, store, {"model": "a"}, {"commit": "b"}, batch)
        self.shrinks = shrinks
        self.numbers, self.fits, self.tried = numbers, fits, list[list[int]]()

    def cell_of(self, row: Row) -> Cell:
        return cell_of(row)

    def items(self, cell: Cell) -> list[int]:
        return self.numbers

    def read(self, rows: list[Row]) -> dict[int, int]:
        return {n: square for row in rows for n, square in zip(row["items"], row["squares"], strict=True)}

    def work(self, cell: Cell, items: list[int]) -> int:
        return 10 * len(items)

    def prepare(self, cell: Cell, items: list[int], batch: int) -> Compute[int]:
        def compute(batch: list[int], on_tokens: OnTokens) -> Iterator[Row]:
            self.tried.append(batch)
            on_tokens(10 * len(batch))
            if len(batch) > self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            if 99 in batch:
                raise KeyboardInterrupt
            yield {"items": batch, "squares": [n * n for n in batch]}

        return compute


def test_rows_have_the_key_of_their_cell_and_the_metadata() -> None:
    store = Store(None)
    assert Squares(store, [1, 2, 3]).results(CELLS) == {cell: [1, 4, 9] for cell in CELLS}
    assert [row["items"] for row in store.rows] == [[1, 2], [3]] * 2
    assert all(row["commit"] == "b" and row["model"] == "a" for row in store.rows)
    assert [cell_of(row) for row in store.rows[::2]] == CELLS


def test_an_interruption_costs_one_batch(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Squares(Store(path), [1, 2, 3, 99]).results(CELLS)
    heard = list[object]()
    progress = Progress(heard.append, heard.append, resumed=lambda *counts: heard.append(counts))
    again = Squares(Store(path), [1, 2, 3, 4])
    assert again.results(CELLS, progress) == {cell: [1, 4, 9, 16] for cell in CELLS}
    assert again.tried == [[3, 4], [1, 2], [3, 4]]
    assert heard == [(2, 8, "numbers"), 60, *CELLS]


def test_with_redo_only_new_rows_count_as_done(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Squares(Store(path), [1, 2]).results(CELLS[:1])
    again = Squares(Store(path, redo=True), [1, 2])
    assert again.results(CELLS[:1]) == {CELLS[0]: [1, 4]}
    assert again.tried == [[1, 2]]


def test_a_batch_that_does_not_fit_is_halved_for_all_that_follow() -> None:
    counted = list[int]()
    squares = Squares(Store(None), [1, 2, 3, 4, 5, 6, 7], batch=4, shrinks=True, fits=2)
    assert squares.results(CELLS[:1], Progress(tokens=counted.append)) == {CELLS[0]: [1, 4, 9, 16, 25, 36, 49]}
    assert [len(batch) for batch in squares.tried] == [4, 2, 2, 2, 1]
    assert sum(counted) == 70
    with pytest.raises(ValueError, match="batch=4: full does not fit into memory"):
        Squares(Store(None), [1, 2, 3, 4], batch=4, fits=2).results(CELLS[:1])


def test_other_cells_that_are_complete() -> None:
    store = Store(None)
    Squares(store, [1, 2]).results(CELLS)
    Squares(store, [1]).results([Cell("window", 8)])
    squares = Squares(store, [1, 2])
    assert squares.others(CELLS[:1]) == {CELLS[1]: [1, 4]}
    assert squares.other_rows == 0
    store.append({**store.rows[-1], "model": "b"})
    assert squares.other_rows == 1


def test_an_item_that_occurs_twice_is_computed_once() -> None:
    squares = Squares(Store(None), [3, 3, 4])
    assert squares.results(CELLS[:1]) == {CELLS[0]: [9, 9, 16]}
    assert squares.tried == [[3, 4]]
