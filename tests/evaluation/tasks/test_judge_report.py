from __future__ import annotations

import csv
from pathlib import Path

import pytest

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.tasks.judge_report import figure, markdown, report_lines, table
from msrnn.evaluation.tasks.verdicts import LOSS, TIE, UNREADABLE, WIN

SMALL, LARGE = Cell("tova", 8), Cell("tova", 16)


def test_shares_and_files(tmp_path: Path) -> None:
    verdicts = {SMALL: [WIN, TIE, LOSS, LOSS, UNREADABLE], LARGE: []}
    found = report_lines(verdicts, {SMALL: [0.5, -2.0, -0.1, 1.0, 3.0], LARGE: []}, {SMALL: 2, LARGE: 5})
    assert {name: share.value for name, share in found[0].shares.items()} == {WIN: 0.25, TIE: 0.25, LOSS: 0.5}
    assert found[0][3:] == (4, 1, 2)
    assert found[0].leaning is not None
    assert found[0].leaning.value == pytest.approx(0.6)
    text = markdown(found, "a model", {"torch": "2"})
    assert "| tova 8 | 25% · 0% to 75% | 25% · 0% to 75% | 50% · 0% to 100% | 60% · 20% to 100% | 4 | 1 | 2 |" in text
    assert "| tova 16 | — | — | — | — | 0 | 0 | 5 |" in text
    rows = list(csv.DictReader(table(found, "").csv().splitlines()))
    assert (rows[0]["loss"], rows[1]["loss"], rows[1]["dropped"]) == ("0.5", "", "5")
    figure(found, tmp_path, "a model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["judge.png", "judge.svg"]
