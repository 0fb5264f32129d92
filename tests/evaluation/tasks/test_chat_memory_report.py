from __future__ import annotations

import csv
import io

import pytest

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.tasks.chat_memory_report import Report

FULL, TOVA, RECALL = Cell("full", None), Cell("tova", 8), Cell("tova + 64 recalled", 8)
CATEGORIES = [4, 1, 5, 4]
REPORT = Report({FULL: [1, 1, 0, 0.5], TOVA: [0, 0, 1, 0], RECALL: [1, 0.5, 1, 0.5]}, CATEGORIES)


def test_columns_have_the_questions_of_their_category() -> None:
    assert REPORT.groups == {
        "multi-hop": [1],
        "single-hop": [0, 3],
        "adversarial": [2],
        "answerable": [0, 1, 3],
        "all": [0, 1, 2, 3],
    }
    assert Report({}, [4, 4]).groups == {"single-hop": [0, 1], "all": [0, 1]}


def test_means_and_paired_differences() -> None:
    assert REPORT.score(RECALL, "single-hop").value == 0.75
    assert REPORT.score(RECALL).value == 0.75
    assert REPORT.score(TOVA, "answerable").value == 0
    assert REPORT.score(TOVA, "multi-hop").low is None  # one question has no interval
    paired = REPORT.difference(RECALL, TOVA)
    assert paired.value == 0.5
    assert paired.low is not None
    assert REPORT.difference(RECALL, FULL, "answerable").value == pytest.approx(-0.5 / 3)


def test_recall_is_compared_with_none_and_all_with_the_full_model() -> None:
    assert REPORT.pairs == [(RECALL, TOVA), (TOVA, FULL), (RECALL, FULL)]
    assert Report({TOVA: [0]}, [4]).pairs == []


def test_tables() -> None:
    scores, differences = REPORT.tables("a title")
    assert scores.header == [
        "version",
        "multi-hop (n = 1)",
        "single-hop (n = 2)",
        "adversarial (n = 1)",
        "answerable (n = 3)",
        "all (n = 4)",
    ]
    assert [row[0] for row in scores.strings()] == ["full", "tova 8", "tova 8 + 64 recalled"]
    assert scores.strings(" ")[1][1:4] == ["0.0%", "0.0% 0.0% to 0.0%", "100.0%"]
    assert differences.strings(" ")[0][:2] == ["tova 8 + 64 recalled against tova 8", "+50.0%"]
    lines = [*csv.DictReader(io.StringIO(scores.csv()))]
    assert len(lines) == 15
    found = {(line["policy"], line["size"], line["category"]): line for line in lines}
    best = found["tova + 64 recalled", "8", "all"]
    assert (best["f1"], best["questions"]) == ("0.75", "4")
    assert found["full", "", "multi-hop"]["low"] == ""


def test_a_page() -> None:
    page = REPORT.markdown("a title", {"model": "m"})
    assert "arXiv:2402.17753" in page
    assert "| tova 8 + 64 recalled | 50.0% |" in page
    assert "- model: m" in page
