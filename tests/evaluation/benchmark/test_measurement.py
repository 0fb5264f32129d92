from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn.evaluation.benchmark.contenders import setup
from msrnn.evaluation.benchmark.measurement import Batches, Benchmark, Ledger, check_record, steps_in_buckets
from msrnn.evaluation.benchmark.table import Row, markdown, remarks, table
from msrnn.evaluation.benchmark.timing import Times
from msrnn.evaluation.store import Store
from tests.helpers.tiny import build, llama

MS = Times(2.0, 1.5, 3.0)


class Pretended:
    """A contender whose steps take no time and fit up to a batch."""

    def __init__(self, label: str, fits: int, rows: int = 8) -> None:
        self.label, self.size, self.nbytes, self.rows, self.buckets = label, rows, 1, rows, (rows,)
        self.fits, self.taken = fits, list[int]()

    @contextmanager
    def stepping(self, batch: int, _: int) -> Iterator[object]:
        self.taken.append(batch)
        if batch > self.fits:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        yield lambda: None

    def reading(self, _: object) -> None:
        return None


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench whose every step takes 2 ms, on a device that reads a byte in one."""
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.milliseconds", lambda step, *_, **__: (step(), MS)[1])
    monkeypatch.setattr("msrnn.core.device_memory.release", lambda: None)
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.bandwidth", lambda _: 1.0)
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.products", lambda *_: 0.0)
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.weight_bytes", lambda _: 3)
    made = setup(build(llama()), 48)

    def bench(batches: Batches, path: Path | None = None, **environment: object) -> tuple[Benchmark, list[str]]:
        said: list[str] = []
        return Benchmark(made, batches, Ledger(Store(path, check_record), environment), said.append), said

    return bench


def by_column(rows: list[Row], row: int) -> dict[str, str]:
    found = table(rows, "")
    return dict(zip(found.header, found.strings()[row], strict=True))


def test_a_row(measured: Any) -> None:
    bench, said = measured(Batches(max_batch=40, equal_batch=4))
    full, small = bench.rows([Pretended("full", 100), Pretended("small", 20)])
    assert (full.batch, full.ms, full.throughput) == (40, MS, 20_000)
    assert full.floor == 40 + 3
    assert full.over_floor == pytest.approx(2 / 43)
    assert full.whole == pytest.approx(20_000)
    assert 17 <= small.batch <= 20
    assert (small.equal_batch, small.equal_throughput, small.one_ms) == (4, 2000, MS)
    assert any("does not fit" in line for line in said)
    assert full.prefill_ms is None


def test_what_does_not_fit_is_missing_and_the_run_goes_on(measured: Any) -> None:
    bench, _ = measured(Batches(batch=16, equal_batch=8))
    rows = bench.rows([Pretended("full", 32), Pretended("none", 0), Pretended("some", 9)])
    assert [row.batch for row in rows] == [16, None, None]
    assert [row.equal_ms for row in rows] == [MS, None, MS]
    shown = table(rows, "").strings()
    assert shown[1][2:] == ["—"] * 10
    assert shown[2][5] == "—"
    assert shown[2][8] == "2.00\n1.50–3.00"  # noqa: RUF001


def test_the_equal_batch_is_what_the_first_fits(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = measured(Batches(batch=10))
    monkeypatch.setattr(bench, "batches", Batches(batch=10))  # not that of a CPU
    rows = bench.rows([Pretended("full", 10), Pretended("other", 10)])
    assert [row.equal_batch for row in rows] == [10, 10]


def test_cells_are_measured_once(measured: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, again, other = Pretended("full", 20), Pretended("full", 20), Pretended("full", 20)
    expected = measured(Batches(max_batch=30), path, model="a")[0].rows([first])
    before = path.read_text()
    assert measured(Batches(max_batch=30), path, model="a")[0].rows([again]) == expected
    assert (again.taken, path.read_text()) == ([], before)
    measured(Batches(max_batch=30), path, model="b")[0].rows([other])
    assert other.taken == first.taken
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all({"cell", "value", "unit", "model"} <= row.keys() for row in rows)
    assert {row["cell"] for row in rows} == {"state", "step", "largest", "bandwidth", "products", "row"}
    assert [row["value"] for row in rows if row.get("batch") == 30] == [None, None]


def test_a_table_has_the_rows_of_earlier_commands(measured: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = measured(Batches(max_batch=4), path, model="a")[0].rows([Pretended("full", 9), Pretended("one", 9)])
    measured(Batches(max_batch=4), path, model="b")[0].rows([Pretended("another model", 9)])
    measured(Batches(max_batch=3), path, model="a")[0].rows([Pretended("another batch", 9)])
    bench, _ = measured(Batches(max_batch=4), path, model="a")
    rows = bench.rows([Pretended("full", 9), Pretended("two", 9)])
    assert bench.others(rows) == [first[1]]


def test_a_step_below_its_floor_is_measured_again(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor was too high, since something else ran: the lower one of all counts."""
    floors = [500.0, 60.0, 1.0]
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.weight_bytes", lambda _: 0)
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.bandwidth", lambda _: 1e9)
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.products", lambda *_: floors.pop(0))
    bench, said = measured(Batches(batch=4, equal_batch=4))
    (row,) = bench.rows([Pretended("full", 9)])
    assert (floors, row.impossible) == ([], False)
    assert row.over_floor == pytest.approx(2.0)
    assert sum("measuring both again" in line for line in said) == 2
    assert "!" not in "".join(table([row], "").strings()[0])


def test_what_stays_below_its_floor_is_marked(measured: Any) -> None:
    bench, said = measured(Batches(batch=40, equal_batch=4))
    rows = bench.rows([Pretended("full", 100)])
    assert rows[0].impossible
    assert by_column(rows, 0)["over floor"] == "0.05 !"
    assert sum("measuring both again" in line for line in said) == 2
    assert any("below the floor, which is impossible" in remark for remark in remarks(rows))
    assert "below the floor, which is impossible" in markdown(rows, {})


def test_a_batch_that_cannot_fit_is_not_tried(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.query_free_memory", lambda _: 10)
    bench, said = measured(Batches(batch=40, equal_batch=4))
    contender = Pretended("full", 100)
    (row,) = bench.rows([contender])
    assert (row.batch, row.equal_batch, set(contender.taken)) == (None, 4, {1, 4})
    assert "full: a step of 40 sequences, 8 KV rows each: does not fit into memory" in said


def test_every_step_is_in_one_bucket() -> None:
    assert steps_in_buckets((512, 1024, 1100), 16, 1100) == [496, 512, 76]
    assert steps_in_buckets((512, 1024), 600, 1024) == [0, 424]
    assert steps_in_buckets((64,), 16, 1000) == [984]
    assert steps_in_buckets((), 16, 1000) == []
