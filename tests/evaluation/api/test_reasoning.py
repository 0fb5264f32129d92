"""`msrnn.evaluation.reasoning`: the numbers are those of the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.cli import main
from msrnn.errors import UsageError
from msrnn.evaluation.api import reasoning
from msrnn.evaluation.api.reasoning import check_datasets, check_drawing, check_problems, reasoning_cases
from msrnn.evaluation.data.problems import load_problems
from msrnn.hf.loading import Loaded
from tests.helpers.characters import character_tokenizer
from tests.helpers.problem_files import write_halves, write_sums
from tests.helpers.word_counts import without_cost

FEW: dict[str, Any] = {"tokenizer": character_tokenizer(), "max_new_tokens": 4, "limit": 2}


def clean(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.items() if k != "file"} for one in without_cost(records)]


def test_reasoning_is_that_of_the_command(
    folder: Path, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.hf.loading.load", lambda *_, **__: Loaded(model, character_tokenizer()))
    files, out = [write_sums(tmp_path), write_halves(tmp_path)], tmp_path / "out"
    words = ["--policy", "tova", "--size", "48", "--protect", "prompt", "--limit", "2", "--max-new-tokens", "4"]
    common = ["--model", str(folder), "--device", "cpu", "--out", str(out), "--samples", "2"]
    assert main(["eval", "reasoning", *map(str, files), *common, *words]) == 0
    expected = [json.loads(line) for line in (out / "reasoning.jsonl").read_text().splitlines()]
    result = evaluation.reasoning(model, files, ["tova"], [48], protect=["prompt"], samples=2, **FEW)
    assert clean(result.records) == clean(expected)
    assert len(expected) == 8
    assert {record["temperature"] for record in expected} == {0.7}
    assert result.table.csv() == (out / "reasoning.csv").read_text()
    given = evaluation.reasoning(model, load_problems(files), ["tova"], [48], protect=["prompt"], samples=2, **FEW)
    assert clean(given.records) == clean(result.records)


def test_one_file_and_positions_past_the_training_length(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known, positions in ((10_000, "original"), (64, "compressed:lnln")):
        monkeypatch.setattr(model.config, "max_position_embeddings", known)
        result = evaluation.reasoning(model, write_sums(tmp_path), ["full"], [48], **FEW)
        assert {record["positions"] for record in result.records} == {positions}
    assert [record["together"] for record in result.records] == [1, 1]


def test_cases() -> None:
    def labels(*arguments: Any) -> list[str]:
        return [case.label for case in reasoning_cases(*arguments)]

    assert labels(["tova", "echo:upper + 8 recalled", "full"], [64], ["prompt", "none", "prompt"]) == [
        "full",
        "tova 64, prompt protected",
        "tova 64",
        "echo:upper 64 + 8 recalled, prompt protected",
        "echo:upper 64 + 8 recalled",
    ]
    assert labels(["full"], [8], ["prompt"]) == ["full"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((["tovas"], [8], ["none"]), "tovas"),
        (([], [8], ["none"]), "policies"),
        ((["tova"], [8], ["system"]), "protect='system': must be one of none, prompt"),
        ((["tova"], [8], []), "protect"),
        ((["tova"], [8], "prompt"), "protect"),
    ],
)
def test_cases_that_are_refused(arguments: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        reasoning_cases(*arguments)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, None, 0, 1), "samples"),
        ((2, 0.0, 0, 1), "samples=2: greedy answers to one prompt are all the same; raise temperature"),
        ((1, -1.0, 0, 1), "temperature"),
        ((1, float("nan"), 0, 1), "temperature"),
        ((1, None, -1, 1), "seed"),
        ((1, None, 0, 0), "max_new_tokens"),
    ],
)
def test_drawings_that_are_refused(arguments: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        check_drawing(*arguments)


def test_one_sample_is_greedy_and_several_are_not() -> None:
    assert check_drawing(1, None, 0, 1).temperature == 0
    assert check_drawing(2, None, 0, 1).temperature == 0.7
    assert check_drawing(1, 0.5, 0, 1).temperature == 0.5


@pytest.mark.parametrize(
    ("arguments", "name"), [((0, 1, "auto"), "limit"), ((1, 0, "auto"), "together"), ((1, 1, "odd"), "positions")]
)
def test_problems_that_are_refused(arguments: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        check_problems(*arguments)


def test_no_problems(model: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="problems"):
        evaluation.reasoning(model, [], ["tova"], [48], **FEW)


def test_only_latex_needs_the_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UsageError("not installed")

    monkeypatch.setattr(reasoning, "check_verifier", refuse)
    check_datasets(load_problems([write_sums(tmp_path)]))
    with pytest.raises(UsageError, match="not installed"):
        check_datasets(load_problems([write_sums(tmp_path), write_halves(tmp_path)]))
