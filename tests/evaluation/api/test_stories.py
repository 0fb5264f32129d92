from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.errors import UsageError
from msrnn.evaluation.api.stories import check_temperature, check_versions
from tests.helpers.word_counts import TOKENIZER

FEW: dict[str, Any] = {"tokenizer": TOKENIZER, "count": 2, "max_new_tokens": 12, "chat": False}


def test_stories_of_the_full_model_and_of_a_policy(model: PreTrainedModel, tmp_path: Path) -> None:
    result = evaluation.stories(model, ["tova"], [16], seed=5, folder=tmp_path, **FEW)
    assert [(line.cell.label, line.stories) for line in result.report] == [("full", 2), ("tova 16", 2)]
    assert sorted(record["seed"] for record in result.records) == [5, 5, 6, 6]
    assert "2 stories of at most 12 tokens" in result.table.title
    before = (tmp_path / "story.jsonl").read_bytes()
    again = evaluation.stories(model, [], [16], seed=5, folder=tmp_path, **FEW)
    assert again.others == ["tova 16"]
    assert (tmp_path / "story.jsonl").read_bytes() == before


@pytest.mark.parametrize("temperature", [0, -1, 100.5, float("nan")])
def test_temperatures_that_are_refused(temperature: float) -> None:
    check_temperature(0.01)
    check_temperature(100)
    with pytest.raises(UsageError) as refused:
        check_temperature(temperature)
    assert refused.value.name == "temperature"


def test_versions_that_are_refused() -> None:
    check_versions(["tova", "window+4"], [16])
    with pytest.raises(UsageError, match="stories are the full model's until the first eviction"):
        check_versions(["tova:upper"], [16])
    with pytest.raises(UsageError, match="size"):
        check_versions(["tova"], [16, 0])


@pytest.mark.parametrize("name", ["count", "max_new_tokens"])
def test_counts_that_are_refused(model: PreTrainedModel, name: str) -> None:
    with pytest.raises(UsageError) as refused:
        evaluation.stories(model, ["tova"], [16], **{**FEW, name: 0})
    assert refused.value.name == name
