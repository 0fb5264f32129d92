from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.errors import UsageError
from msrnn.evaluation.api.extrapolation import check_course, extrapolation_cases
from tests.helpers.word_counts import TEXTS, TOKENIZER

READING: dict[str, Any] = {"tokenizer": TOKENIZER, "tokens": 60, "window": 20, "leg": 40}


def test_windows_of_each_text(model: PreTrainedModel, tmp_path: Path) -> None:
    result = evaluation.extrapolation(model, TEXTS, ["tova@original"], 8, folder=tmp_path, **READING)
    assert [record["stop"] for record in result.records] == [40, 60] * 2
    assert result.report.ends == [20, 40, 60]
    assert "60 tokens of 2 texts, size 8" in result.table.title
    assert (tmp_path / "extrapolation.jsonl").exists()


def test_texts_that_are_too_short_are_left_out(model: PreTrainedModel) -> None:
    texts = {**TEXTS, "short": "a"}
    result = evaluation.extrapolation(model, texts, ["full@original"], 8, **{**READING, "leg": 60})
    assert len(result.records) == 2
    assert "unbounded" in result.table.title


def test_the_rows_without_a_choice() -> None:
    assert [case.label for case in extrapolation_cases(None, 100)] == [
        "tova@compressed:lnln",
        "window+4@compact",
        "tova@original",
        "echo+1~400@compressed:lnln",
    ]
    with pytest.raises(UsageError):
        extrapolation_cases(["tova@nowhere"], 100)


@pytest.mark.parametrize(
    ("course", "name"), [((1, 1, 1), "tokens"), ((9, 0, 1), "window"), ((9, 1, 0), "leg"), ((90, 20, 50), "leg")]
)
def test_courses_that_are_refused(course: tuple[int, int, int], name: str) -> None:
    check_course(90, 20, 60)
    with pytest.raises(UsageError) as refused:
        check_course(*course)
    assert refused.value.name == name


def test_a_window_of_given_tokens_alone_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="window=1: the first 1 tokens are given and not predicted"):
        evaluation.extrapolation(model, TEXTS, ["tova@original"], 8, **{**READING, "window": 1})
