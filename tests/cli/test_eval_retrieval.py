"""`msrnn eval retrieval`: tables, heatmaps, and answers that are computed once."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from msrnn.evaluation.data.needles import score
from msrnn.evaluation.generation import answer_prompts
from msrnn.evaluation.task import Job
from msrnn.evaluation.tasks import retrieval as retrieval_file
from tests.helpers.command import Run

FEW = ("--size", "24", "--length", "700", "--task", "number", "--depth", "0", "--depth", "1")


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "retrieval.jsonl").read_text().splitlines()]


def test_tables_and_figures(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores are those of the answers: here the model says half of what is expected, if it is asked last."""
    compute = retrieval_file.Retrieval.prepare

    def prepared(self: retrieval_file.Retrieval, job: Job[retrieval_file.Case, str], model: Any) -> object:
        found = compute(self, job, model)

        def answers(some: list[str], on_tokens: object) -> object:
            for fields in found(some, on_tokens):  # type: ignore[arg-type]
                expected = fields["expected"]
                said = expected[: max(1, len(expected) // 2)] if job.cell.place == "last" else []
                yield {**fields, "answer": " ".join(said)}

        return answers

    monkeypatch.setattr(retrieval_file.Retrieval, "prepare", prepared)
    done = run(
        "eval",
        "retrieval",
        *FEW,
        "--task",
        "values",
        "--policy",
        "tova",
        "--policy",
        "full",
        "--limit",
        "2",
        "--out",
        tmp_path,
    )
    assert done.code == 0, done.err
    lines = list(csv.DictReader((tmp_path / "retrieval.csv").open()))
    shares = {(line["question"], line["task"]): float(line["accuracy"]) for line in lines}
    assert shares == {("first", "number"): 0, ("first", "values"): 0, ("last", "number"): 1, ("last", "values"): 0.5}
    assert {line["policy"] for line in lines} == {"tova", "full"}
    assert {line["questions"] for line in lines} == {"1"}
    page = (tmp_path / "retrieval.md").read_text()
    assert "| tova 24 | 100% · 100% to 100% | 50% · 50% to 50% |" in page
    assert (tmp_path / "retrieval.png").stat().st_size > 10_000


def test_a_run_resumes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ("eval", "retrieval", *FEW, "--policy", "tova", "--question", "last", "--limit", "4", "--batch", "2")
    assert run(*words, "--out", whole).code == 0

    def interrupted(*arguments: object) -> object:
        for number, answer in enumerate(answer_prompts(*arguments)):  # type: ignore[arg-type]
            if number == 3:
                raise KeyboardInterrupt
            yield answer

    with monkeypatch.context() as patched:
        patched.setattr(retrieval_file, "answer_prompts", interrupted)
        assert run(*words, "--out", cut).code == 130
    assert len(rows(cut)) == 3
    done = run(*words, "--out", cut)
    assert "3 of 4 answers already done" in done.err
    said = [{row["item"]: row["answer"] for row in rows(folder)} for folder in (whole, cut)]
    assert said[0] == said[1]
    assert len(rows(cut)) == 4
    assert all(0 <= score(str(row["answer"]), row["expected"]) <= 1 for row in rows(cut))  # type: ignore[arg-type]
    assert (whole / "retrieval.csv").read_text() == (cut / "retrieval.csv").read_text()

    # Other questions of the same folder are not in the tables.
    first = tuple("first" if word == "last" else word for word in words)
    assert run(*first, "--out", cut).code == 0
    page = (cut / "retrieval.md").read_text()
    assert "question first" in page
    assert "question last" not in page


@pytest.mark.usefixtures("undrawn")
def test_versions_that_recall(run: Run, tmp_path: Path) -> None:
    words = ("eval", "retrieval", *FEW, "--policy", "tova", "--question", "last", "--limit", "1", "--out", tmp_path)
    for more in ((), ("--recall", 8, "--recall-every", 2, "--recall-while-reading", 64)):
        assert run(*words, *more).code == 0
    name = "tova + 8 recalled every 2, every 64 while reading"
    assert [row["policy"] for row in rows(tmp_path)] == ["tova", name]
    page = (tmp_path / "retrieval.md").read_text()
    assert "| tova 24 + 8 recalled every 2, every 64 while reading |" in page
    assert "| tova 24 |" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "hay"), "--task hay: must be one of number, word, uuid, keys, values, json, variables"),
        (("--depth", "2"), "--depth 2: must be from 0 to 1"),
        (("--limit", "0"), "--limit 0: must be a whole number, 1 or more"),
        (("--policy", "best"), "best"),
        (("--length", "30"), "--length 30: a question of task number alone takes"),
    ],
)
def test_bad_options(words: tuple[str, ...], message: str, run: Run, tmp_path: Path) -> None:
    done = run("eval", "retrieval", "--no-chat", *words, "--out", tmp_path)
    assert done.code == 2
    assert message in done.err
