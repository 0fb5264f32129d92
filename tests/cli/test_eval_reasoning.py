"""`msrnn eval reasoning`: versions with and without protection in one folder, and answers that are computed once."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msrnn.evaluation.generation import answer_prompts
from msrnn.evaluation.tasks import reasoning
from tests.helpers.command import Run
from tests.helpers.problem_files import write_halves, write_lines, write_sums

FEW = ("--policy", "tova", "--size", "48", "--max-new-tokens", "4")


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write_sums(tmp_path)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "reasoning.jsonl").read_text().splitlines()]


def test_protected_and_other_versions_share_a_folder(run: Run, sums: Path, tmp_path: Path) -> None:
    out, both = tmp_path / "out", (sums, write_halves(tmp_path))
    assert run("eval", "reasoning", *both, *FEW, "--policy", "full", "--out", out).code == 0
    done = run("eval", "reasoning", *both, *FEW, "--protect", "prompt", "--out", out)
    assert done.code == 0, done.err
    assert "the tables also show full, tova 48, from earlier commands" in done.err
    assert len(records(out)) == 15
    lines = list(csv.DictReader((out / "reasoning.csv").open()))
    assert {(line["policy"], line["protect"], line["dataset"], line["problems"]) for line in lines} == {
        (policy, protect, *data)
        for policy, protect in (("full", "none"), ("tova", "none"), ("tova", "prompt"))
        for data in (("GSM8K", "3"), ("MATH-500", "2"))
    }
    page = (out / "reasoning.md").read_text()
    assert "| tova 48, prompt protected against tova 48 |" in page
    assert {one["file"] for one in records(out)} == {"sums.jsonl, halves.jsonl"}


def test_a_run_resumes(run: Run, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ("eval", "reasoning", sums, *FEW, "--samples", "2")
    assert run(*words, "--out", whole).code == 0

    def interrupted(*arguments: Any) -> Iterator[Any]:
        for count, answer in enumerate(answer_prompts(*arguments)):
            if count == 4:
                raise KeyboardInterrupt
            yield answer

    with monkeypatch.context() as patched:
        patched.setattr(reasoning, "answer_prompts", interrupted)
        assert run(*words, "--out", cut).code == 130
    assert len(records(cut)) == 4
    done = run(*words, "--out", cut)
    assert "4 of 6 answers already done" in done.err
    assert len(records(cut)) == 6
    assert (whole / "reasoning.csv").read_text() == (cut / "reasoning.csv").read_text()
    done = run(*words[:-1], "3", "--out", cut)
    assert "6 of 9 answers already done" in done.err


def test_problems_together_without_a_template(run: Run, sums: Path, tmp_path: Path) -> None:
    done = run("eval", "reasoning", sums, *FEW, "--together", "2", "--no-chat", "--recall", "16", "--out", tmp_path)
    assert done.code == 0, done.err
    assert [len(one["right"]) for one in sorted(records(tmp_path), key=lambda one: -len(one["right"]))] == [2, 1]
    assert {(one["policy"], one["chat"]) for one in records(tmp_path)} == {("tova + 16 recalled", False)}
    assert "2 problems in each prompt" in (tmp_path / "reasoning.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--protect", "system"), "--protect"),
        (("--samples", "0"), "--samples 0: must be"),
        (("--samples", "2", "--temperature", "0"), "--samples 2: greedy answers"),
        (("--temperature", "-1"), "--temperature -1"),
        (("--together", "0"), "--together 0: must be"),
        (("--limit", "0"), "--limit 0: must be a whole number, 1 or more"),
        (("--policy", "best"), "best"),
        (("--positions", "odd"), "--positions odd"),
        (("--batch", "0"), "--batch 0"),
    ],
)
def test_bad_options(words: tuple[str, ...], message: str, run: Run, sums: Path, tmp_path: Path) -> None:
    done = run("eval", "reasoning", sums, *words, "--out", tmp_path / "out")
    assert done.code == 2
    assert message in done.err


def test_files_of_another_format(run: Run, sums: Path, tmp_path: Path) -> None:
    other = write_lines(tmp_path / "other.jsonl", [{"text": "hello"}])
    done = run("eval", "reasoning", sums, other, "--out", tmp_path / "out")
    assert done.code == 2
    assert "other.jsonl, line 1: no text in the field 'question'; each line needs" in done.err
    done = run("eval", "reasoning", sums, tmp_path / "gone.jsonl", "--out", tmp_path / "out")
    assert done.code == 2
    assert "gone.jsonl: no such file" in done.err
