"""Runs of perplexity: what was measured is not measured again, and a batch that does not fit is halved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.evaluation.cells import BASELINE, Cell
from msrnn.evaluation.data.texts import Data
from msrnn.evaluation.runner import Progress
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.perplexity import Reader
from msrnn.policy import NAMES, Policy
from tests.helpers.perplexity_chunks import FULL, data, runner
from tests.helpers.tiny import build, llama


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


CELLS = [FULL, Cell("tova", 8), Cell(BASELINE, 8)]


class Counted:
    """Every chunk that a cell reads; stops like Ctrl-C after so many batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop: int = 10**6) -> None:
        self.read: list[tuple[str, int | None, tuple[int, ...]]] = []
        original, batches = Reader.nll, iter(range(10**6))

        def nll(reader: Reader, ids: Tensor, on_tokens: Any = None) -> list[float]:
            if next(batches) == stop:
                raise KeyboardInterrupt
            policy = reader.rnn.spec.fingerprint["policy"]
            self.read += [(policy, reader.piece, tuple(row)) for row in ids.tolist()]
            return original(reader, ids, on_tokens)

        monkeypatch.setattr(Reader, "nll", nll)


@pytest.mark.parametrize(("stop", "cut_off"), [(0, False), (1, False), (3, True), (5, False)])
def test_a_run_that_was_stopped_goes_on(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, cut_off: bool
) -> None:
    made, path = data(5), tmp_path / "rows.jsonl"
    expected = runner(model, made, Store(None), 2, {}).results(CELLS)
    with monkeypatch.context() as patched:
        first = Counted(patched, stop)
        with pytest.raises(KeyboardInterrupt):
            runner(model, made, Store(path), 2, {"commit": "a"}).results(CELLS)
    if cut_off:
        path.write_bytes(path.read_bytes() + b'{"policy": "tova", "nll": [12')
    with monkeypatch.context() as patched:
        second = Counted(patched)
        assert runner(model, made, Store(path), 2, {"commit": "b"}).results(CELLS) == expected
    both = first.read + second.read
    assert len(both) == len(set(both)) == 15
    assert len(first.read) == len([chunk for row in Store(path).matching({"commit": "a"}) for chunk in row["chunks"]])
    with monkeypatch.context() as patched:
        third = Counted(patched)
        heard: list[object] = []
        assert runner(model, made, Store(path), 1, {}).results(CELLS, Progress(heard.append, heard.append)) == expected
    assert (third.read, heard) == ([], [0])


def test_what_makes_another_result(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cells = tmp_path / "rows.jsonl", [Cell("tova", 8)]

    def read(model: PreTrainedModel, made: Data, cells: list[Cell]) -> int:
        with monkeypatch.context() as patched:
            counted = Counted(patched)
            runner(model, made, Store(path), 2, {}).results(cells)
        return len(counted.read)

    assert read(model, data(2), cells) == 2
    assert read(model, data(3), cells) == 1
    assert read(model, data(3), [Cell("tova", 9)]) == 3
    assert read(model, data(3), [Cell("tova+1", 8)]) == 3
    assert read(model, data(3), [Cell("tova + 4 recalled", 8)]) == 3
    assert read(model, data(3), [Cell("tova + 4 recalled every 2", 8)]) == 3
    assert read(build(llama(), seed=1), data(3), cells) == 3
    assert read(build(llama()).bfloat16(), data(3), cells) == 3
    assert read(model, data(3), cells) == 0
    monkeypatch.setitem(NAMES, "tova", Policy(decay=0.5))
    assert read(model, data(3), cells) == 3


def test_a_row_tells_where_it_is_from(model: PreTrainedModel, tmp_path: Path) -> None:
    path, counted = tmp_path / "rows.jsonl", list[int]()
    made = data(3)
    runner(model, made, Store(path), 2, {"torch": "2"}).results(CELLS[1:2], Progress(tokens=counted.append))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["texts"] for row in rows] == [[["book", 0], ["book", 40]], [["book", 80]]]
    assert rows[0]["numbers"] == {
        "decay": 0.0,
        "per": "layer",
        "first": 0,
        "recent": 0,
        "value_norm": False,
        "horizon": None,
    }
    assert {"seconds", "backend", "data", "fingerprint", "dtype", "length", "torch"} <= rows[0].keys()
    assert rows[0]["tokens"] == 39
    assert sum(counted) == 3 * 39


def test_a_batch_that_does_not_fit(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def nll(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Reader, "nll", nll)
    with pytest.raises(ValueError, match="batch=2: tova 8 does not fit"):
        runner(model, data(2), Store(None), 8, {}).results([Cell("tova", 8)])


def test_a_batch_that_nobody_asked_for_is_halved_until_it_fits(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, counted, original = list[int](), list[int](), Reader.nll
    expected = runner(model, data(5), Store(None), 1, {}).results([Cell("tova", 8)])

    def nll(self: Reader, ids: torch.Tensor, on_tokens: Callable[[int], object]) -> list[float]:
        tried.append(len(ids))
        if len(ids) > 2:
            on_tokens(7)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, ids, on_tokens)

    monkeypatch.setattr(Reader, "nll", nll)
    evaluation = runner(model, data(5), Store(None), None, {})
    assert evaluation.batch == 1, "on a CPU"
    evaluation.batch = 4
    found = evaluation.results([Cell("tova", 8)], Progress(tokens=counted.append))
    assert found == {cell: pytest.approx(values) for cell, values in expected.items()}
    assert tried == [4, 2, 2, 1]
    assert sum(counted) == 5 * 39
