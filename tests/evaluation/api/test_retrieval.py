"""`msrnn.evaluation.retrieval`: the numbers are those of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.errors import UsageError
from msrnn.evaluation.api.retrieval import check_questions, retrieval_grid, spread_over_depths
from tests.helpers.word_counts import TEXTS, TOKENIZER, without_cost

FEW: dict[str, Any] = {"tasks": ["number"], "lengths": [600], "limit": 1, "chat": False, "question": "last"}


def test_retrieval_is_that_of_the_command(of_command: Any, model: PreTrainedModel, tmp_path: Path) -> None:
    words = ("--policy", "tova", "--size", "24", "--length", "700", "--task", "number", "--limit", "2", "--no-chat")
    expected = of_command(tmp_path, "retrieval", *words, "--question", "last")
    few = {"tasks": ["number"], "lengths": [700], "limit": 2, "chat": False, "question": "last"}
    text = "\n\n".join(TEXTS.values())
    result = evaluation.retrieval(model, text, ["tova"], [24], tokenizer=TOKENIZER, **few)  # type: ignore[arg-type]
    assert without_cost(result.records) == without_cost(expected)
    assert result.table.csv() == (tmp_path / "retrieval.csv").read_text()


@pytest.mark.parametrize(
    ("limit", "places"),
    [
        (1, [(0.0, 0)]),
        (2, [(0.0, 0), (0.5, 0)]),
        (3, [(0.0, 0), (0.5, 0), (1.0, 0)]),
        (4, [(0.0, 0), (0.5, 0), (1.0, 0), (0.0, 1)]),
    ],
)
def test_questions_are_spread_over_the_depths(limit: int, places: list[tuple[float, int]]) -> None:
    assert spread_over_depths([0.0, 0.5, 1.0], limit) == places


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tasks": ["number", "hay"]}, "task"),
        ({"lengths": [1]}, "length"),
        ({"depths": [0.5, 1.5]}, "depth"),
        ({"limit": 0}, "limit"),
        ({"question": "middle"}, "question"),
        ({"positions": "odd"}, "positions"),
    ],
)
def test_questions_that_are_refused(change: dict[str, Any], name: str) -> None:
    good: dict[str, Any] = {"tasks": ["number"], "lengths": [2], "depths": [0, 1], "limit": 1, "question": "both"}
    check_questions(**good, positions="auto")
    with pytest.raises(UsageError) as refused:
        check_questions(**{**good, "positions": "auto", **change})
    assert name in (refused.value.name or str(refused.value))


def test_no_size_means_the_full_model() -> None:
    """Prompts have several lengths."""
    assert [cell.label for cell in retrieval_grid(["tova", "full"], [10**9, 8]).cells] == [
        "full",
        "tova 8",
        f"tova {10**9}",
    ]
    with pytest.raises(UsageError, match="did you mean 'tova'"):
        retrieval_grid(["tovas"], [8])


@pytest.mark.slow
def test_positions_are_compressed_past_the_training_length(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n\n".join(TEXTS.values())
    for known, positions in ((10_000, "original"), (500, "compressed:lnln")):
        monkeypatch.setattr(model.config, "max_position_embeddings", known)
        result = evaluation.retrieval(model, text, ["tova"], [24], tokenizer=TOKENIZER, **FEW)
        assert {record["positions"] for record in result.records} == {positions}
