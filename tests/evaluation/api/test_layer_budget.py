from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.budget import load_budget
from msrnn.errors import UsageError
from msrnn.evaluation.api.layer_budget import check_budget
from tests.helpers.word_counts import TEXTS, TOKENIZER


def test_a_budget_is_measured_divided_and_written(model: PreTrainedModel, tmp_path: Path) -> None:
    result = evaluation.layer_budget(model, TEXTS, "tova", [16, 8, 8], [12], tokenizer=TOKENIZER, length=33)
    report = result.report
    assert (report.policy, [*report.layers], report.sizes) == ("tova", [0, 1], [8, 16])
    assert {mean: sum(sizes) for mean, sizes in report.divided.items()} == {12: 24}
    assert "rows of each layer" in str(result)
    assert {(record["layer"], record["size"]) for record in result.records} == {
        (None, None),
        *((layer, size) for layer in (0, 1) for size in (8, 16)),
    }
    report.write(tmp_path / "budget.json", {"model": "tiny"})
    assert load_budget(str(tmp_path / "budget.json")).sizes(12, 2) == report.divided[12]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"policy": "full"}, "policy"),
        ({"policy": "tova:upper"}, "policy"),
        ({"sizes": [8]}, "size"),
        ({"sizes": [8, 33]}, "size"),
        ({"sizes": [0, 8]}, "size"),
        ({"means": [7]}, "mean"),
        ({"means": [12, 17]}, "mean"),
    ],
)
def test_what_cannot_be_measured(change: dict[str, Any], name: str) -> None:
    good: dict[str, Any] = {"policy": "tova", "sizes": [8, 16], "means": [8, 16], "length": 33}
    check_budget(**good)
    with pytest.raises(UsageError) as refused:
        check_budget(**{**good, **change})
    assert refused.value.name == name
