from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from msrnn.evaluation.tasks.extrapolation_report import Report, Results, figure
from tests.helpers.courses import CASES, COURSE


@pytest.fixture
def report() -> Report:
    windows = [4, *[5] * 9, 3]
    flat = [math.log(10) * n for n in windows]
    rising = [math.log(10 + i) * n for i, n in enumerate(windows)]
    results: Results = {CASES[0]: [flat, flat], CASES[1]: [rising, flat]}
    return Report(results, COURSE)


def test_means_so_far_and_by_window(report: Report) -> None:
    assert [e.value for e in report.so_far[CASES[0]]] == pytest.approx([10.0] * 11)
    last = report.windows[CASES[1]][-1]
    assert last.value == pytest.approx(math.sqrt(20 * 10))
    assert (last.low, last.high) == (pytest.approx(10.0), pytest.approx(20.0))
    so_far = report.so_far[CASES[1]][1].value
    assert so_far == pytest.approx(math.exp((4 * math.log(10) + 5 * math.log(11) + 9 * math.log(10)) / 18))
    assert [report.ends[i] for i in report.columns] == [5, 10, 20, 40, 53]


def test_files(report: Report, tmp_path: Path) -> None:
    lines = list(csv.DictReader(report.tables("")[0].csv().splitlines()))
    assert len(lines) == 2 * 11
    assert (lines[10]["tokens"], lines[10]["positions"], lines[10]["texts"]) == ("53", "compressed:lnln", "2")
    assert float(lines[10]["so_far"]) == pytest.approx(10.0)
    text = report.markdown("a model", {"commit": "abc"})
    assert "| tova@compressed:lnln | 10.00 · 10.00–10.00 |" in text  # noqa: RUF001
    assert "- commit: abc" in text
    figure(report, tmp_path, "a model", 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["extrapolation.png", "extrapolation.svg"]
