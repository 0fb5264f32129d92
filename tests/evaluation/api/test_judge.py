from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.errors import FileError, UsageError
from msrnn.evaluation import EvaluationResult, LocalJudge
from msrnn.evaluation.tasks.judge_models import Answer
from tests.helpers.word_counts import TOKENIZER


@pytest.fixture(scope="module")
def written(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[EvaluationResult[Any], Path]:
    """Two pairs of stories, which differ."""
    folder = tmp_path_factory.mktemp("stories")
    few: dict[str, Any] = {"tokenizer": TOKENIZER, "count": 2, "seed": 1, "max_new_tokens": 40, "chat": False}
    return evaluation.stories(model, ["tova"], [16], folder=folder, **few), folder


class Fond:
    """A judge that prefers the stories that it is fond of."""

    def __init__(self, *stories: str) -> None:
        self.name, self.key, self.device, self.requests, self.stories = "fond", {"judge": "fond"}, "cpu", 0, stories

    def ask(self, prompt: str, most: int | None = None) -> Answer:
        self.requests += 1
        first = prompt.split("Response (A):")[1].split("Response (B):")[0]
        return Answer("(A)" if any(story in first for story in self.stories) else "(B)", {})


def bounded(result: EvaluationResult[Any]) -> list[str]:
    return [record["story"] for record in result.records if record["policy"] == "tova"]


def test_the_verdicts_are_of_the_bounded_model(written: tuple[EvaluationResult[Any], Path]) -> None:
    stories, folder = written
    by_result = evaluation.judge(stories, Fond(*bounded(stories)))
    by_folder = evaluation.judge(folder, Fond(*bounded(stories)))
    assert by_result.report == by_folder.report
    (line,) = by_result.report
    assert (line.cell.label, line.pairs, line.shares["win"].value) == ("tova 16", 2, 1.0)
    (line,) = evaluation.judge(stories, Fond()).report
    assert (line.pairs, line.shares["tie"].value) == (2, 1.0)
    assert [path.name for path in folder.iterdir()] == ["story.jsonl"]


def test_answers_of_a_folder_are_not_asked_again(written: tuple[EvaluationResult[Any], Path], tmp_path: Path) -> None:
    stories, notes = written[0], list[str]()
    by = Fond(*bounded(stories))
    assert evaluation.judge_cost(stories, by, folder=tmp_path / "new").requests == 4
    part = evaluation.judge(stories, by, max_requests=3, folder=tmp_path)
    assert (by.requests, len(part.records), part.report[0].pairs) == (3, 3, 1)
    assert evaluation.judge_cost(stories, by, folder=tmp_path).requests == 1
    whole = evaluation.judge(stories, by, folder=tmp_path, progress=evaluation.Progress(note=notes.append))
    assert (by.requests, len(whole.records), whole.report[0].pairs) == (4, 4, 2)
    assert notes == ["2 pairs; 0 more, in which nothing was evicted, are dropped"]
    assert whole.facts["judge"] == "fond"
    other = Fond()
    other.key = {"judge": "other"}
    assert evaluation.judge(stories, other, folder=tmp_path).left_out == 4


def test_a_local_model_is_a_judge(written: tuple[EvaluationResult[Any], Path], model: PreTrainedModel) -> None:
    result = evaluation.judge(written[0], LocalJudge("tiny", model, TOKENIZER))
    assert (result.report[0].pairs, len(result.records)) == (2, 4)
    assert result.report[0].leaning is not None
    assert "judged by tiny" in str(result)


def test_what_is_refused(written: tuple[EvaluationResult[Any], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        evaluation.judge(written[0], Fond(), max_requests=0)
    assert refused.value.name == "max_requests"
    with pytest.raises(FileError, match=r"story\.jsonl: no such file"):
        evaluation.judge(tmp_path, Fond())
