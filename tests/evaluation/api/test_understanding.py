"""`msrnn.evaluation.understanding` on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.errors import UsageError
from msrnn.evaluation.api.understanding import resolve_settings, understanding_grid
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.data.questions import Question, Reference
from msrnn.evaluation.runner import Progress
from msrnn.evaluation.tasks.question_tasks import TASKS
from tests.helpers.word_counts import TEXTS, TOKENIZER

QUESTIONS = [
    Question(f"{name}/1", name, text[:200], "how many?", [Reference("two words"), Reference("three")])
    for name, text in TEXTS.items()
]
FEW: dict[str, Any] = {"tokenizer": TOKENIZER, "length": 560, "max_new_tokens": 4, "chat": False}


@pytest.fixture
def learned(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """The model, as if its positions were learned, 600 of them."""
    monkeypatch.setattr(model.config, "max_position_embeddings", 600)
    monkeypatch.setattr(model.config, "rope_parameters", None)
    return model


def test_answers_and_scores(model: PreTrainedModel, tmp_path: Path) -> None:
    found = evaluation.understanding(model, QUESTIONS, ["tova", "full"], [16], folder=tmp_path, **FEW)
    assert {(record["policy"], record["size"]) for record in found.records} == {("full", None), ("tova", 16)}
    assert len(found.records) == 4
    assert [row[0] for row in found.table.strings()] == ["tova", "full"]
    assert f"{len(QUESTIONS)} questions, prompts of 560 tokens" in found.table.title
    assert found.facts["task"] == "qasper"

    before = (tmp_path / "qasper.jsonl").read_bytes()
    again = evaluation.understanding(model, QUESTIONS, ["full"], [16], folder=tmp_path, **FEW)
    assert again.others == ["tova 16"]  # of the call before
    assert (tmp_path / "qasper.jsonl").read_bytes() == before  # nothing was answered again


def test_a_model_that_answers_as_expected_scores_everything(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (answer,) = (
        record["prediction"] for record in evaluation.understanding(model, QUESTIONS[:1], ["full"], [16], **FEW).records
    )
    right = [QUESTIONS[0]._replace(references=[Reference(answer)])]
    found = evaluation.understanding(model, right, ["full"], [16], **FEW)
    wrong = evaluation.understanding(model, QUESTIONS[:1], ["full"], [16], **FEW)
    assert found.table.strings() != wrong.table.strings()


@pytest.mark.parametrize(
    ("change", "name"),
    [({"task": "quiz"}, "task"), ({"against": "h2o"}, "against"), ({"sizes": [0]}, "size"), ({"length": 20}, None)],
)
def test_bad_arguments(model: PreTrainedModel, change: dict[str, Any], name: str | None) -> None:
    arguments: dict[str, Any] = {"policies": ["tova"], "sizes": [16], **FEW, **change}
    with pytest.raises(UsageError) as refused:
        evaluation.understanding(model, QUESTIONS, **arguments)
    assert refused.value.name == name
    assert name is not None or str(refused.value).startswith("length=20: question one/1 alone takes")


def test_a_prompt_of_any_length_is_cut_or_not() -> None:
    """So no size means the full model, and truncation takes any."""
    cells = understanding_grid(["tova", "truncated", "full"], [8, 10**9]).cells
    assert cells[0] == Cell("full", None)
    assert {cell.label for cell in cells[1:]} == {
        f"{name} {size}" for name in ("tova", "truncated") for size in (8, 10**9)
    }
    with pytest.raises(UsageError, match="did you mean 'tova'"):
        understanding_grid(["tovas"], [8])


def test_positions_are_compressed_past_the_training_length(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    kind, cells = TASKS["qasper"], [Cell("tova", 16)]
    for known, positions in ((10_000, "original"), (500, "compressed:lnln")):
        monkeypatch.setattr(model.config, "max_position_embeddings", known)
        settings = resolve_settings(kind, model, False, 560, 4, "auto", cells, said.append)
        assert (settings.positions, settings.length, settings.answer) == (positions, 560, 4)
    assert any("bounded states use compressed positions" in text for text in said)


def test_an_answer_needs_learned_positions_too(learned: PreTrainedModel) -> None:
    kind, cells = TASKS["qasper"], [Cell("tova", 16)]
    with pytest.raises(UsageError, match="this model has 600 positions"):
        resolve_settings(kind, learned, False, 590, 20, "original", cells, lambda _: None)


def test_progress_is_told(model: PreTrainedModel) -> None:
    announced: list[Any] = []
    tokens: list[int] = []
    evaluation.understanding(
        model, QUESTIONS[:1], ["tova"], [16], progress=Progress(announced.append, tokens.append), **FEW
    )
    assert announced
