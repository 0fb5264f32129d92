from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from msrnn.evaluation.cells import Cell, Grid, grid
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.answer_scores import scores
from msrnn.evaluation.tasks.answers import Answers, Settings
from msrnn.evaluation.tasks.question_tasks import QASPER
from msrnn.evaluation.tasks.understanding_report import Report, figure, format_score

FULL = Cell("full", None)


def reported(tmp_path: Path | None = None) -> Report:
    """Three questions on two documents, and answers whose scores are known."""
    store = Store(tmp_path and tmp_path / "rows.jsonl")
    settings = Settings("qasper", "f", "float32", False, 64, "original", 4)
    table = grid(["tova", "full"], [8], 10**6)
    said = {FULL: ["x y", "yes", "no"], Cell("tova", 8): ["x", "no", "no"]}
    keys = []
    for i, (document, truth) in enumerate((("a", "x y"), ("a", "yes"), ("b", "no"))):
        row = {"question": f"q{i}", "name": f"{document}/{i}", "document": document, "question_text": "?"}
        prompts = {64: [f"p{i}", 60, 10 * i]}
        store.append(
            {**settings.key, **row, "references": [[truth, "yes/no" if i else "free-form"]], "prompts": prompts}
        )
        keys.append(f"q{i}")
    for cell, texts in said.items():
        for i, text in enumerate(texts):
            store.append(
                {**settings.answer_key_of(cell), "prompt": f"p{i}", "prediction": text, "model": "m", "torch": "2"}
            )
    return remade(Answers(store, settings), table, keys)


def remade(answers: Answers, table: Grid, keys: list[str]) -> Report:
    return Report(QASPER, table, answers, keys, "tova", scores(QASPER.metric, answers, table.cells, keys))


def test_scores_and_differences() -> None:
    report = reported()
    assert report.score("full", 8).value == 100
    assert report.score("tova", 8).value == pytest.approx((200 / 3 + 0 + 100) / 3)
    found = report.difference("full", 8)
    assert found is not None
    assert found.value == pytest.approx(100 - (200 / 3 + 100) / 3)
    # Of two documents, a quarter of the draws is the first alone, with two questions, and a quarter the second.
    assert (found.low, found.high) == (pytest.approx(0), pytest.approx(100 - 100 / 3))
    assert report.difference("tova", 8) is None
    assert report.kinds("tova", 8) == {"free-form": [pytest.approx(200 / 3)], "yes/no": [0, 100]}
    assert report.summary() == (
        "3 on 2 documents; prompts of 60 tokens on average; 10 tokens of the document cut on average, in 2 of them"
    )


def test_files(tmp_path: Path) -> None:
    report = reported(tmp_path)
    text = report.markdown("a model", {"torch": "2", "commit": ""})
    assert "| full | 100.00 · 100.00 to 100.00 |" in text
    assert "| full | +44.44 · +0.00 to +66.67 |" in text
    assert "| tova 8 | 66.67 · 1 | 50.00 · 2 |" in text
    assert text.endswith("- torch: 2\n")
    lines = list(csv.DictReader(report.tables("")[0].csv().splitlines()))
    assert [(line["policy"], line["questions"]) for line in lines] == [("tova", "3"), ("full", "3")]
    assert float(lines[1]["difference"]) == pytest.approx(400 / 9)
    figure(report, tmp_path, "a model")
    assert (tmp_path / "qasper.png").read_bytes().startswith(b"\x89PNG")
    assert format_score(report.score("full", 8)).text(" ") == "100.00 100.00 to 100.00"


def test_rows_alone_make_the_report(tmp_path: Path) -> None:
    """Answers may be scored where there is no model."""
    report = reported(tmp_path)
    store = Store(tmp_path / "rows.jsonl")
    assert all(isinstance(json.loads(line), dict) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    settings = Settings.last(store, "qasper")
    answers = Answers(store, settings)
    assert settings == report.answers.settings
    assert answers.find_answered(report.grid.cells) == report.keys
    assert remade(answers, report.grid, report.keys).tables("")[0].csv() == report.tables("")[0].csv()
    assert answers.find_answered([Cell("tova", 9)]) == []
    assert answers.metadata(FULL, "q0")["model"] == "m"
    with pytest.raises(ValueError, match="no question of squality"):
        Settings.last(store, "squality")
