from __future__ import annotations

from typing import Any

import pytest

from msrnn.cli.recall_options import RecallOptions
from msrnn.errors import UsageError
from msrnn.evaluation.recalled import Recalled


def test_recall_of_the_bounded_rows() -> None:
    assert RecallOptions().add_to(["tova", "full"]) == ["tova", "full"]
    options = RecallOptions(8, 2, 64)
    assert options.recalled == Recalled(8, 2, 64)
    assert options.add_to(["tova", "full"]) == ["tova + 8 recalled every 2, every 64 while reading", "full"]


def test_a_text_without_a_question() -> None:
    assert RecallOptions(8, 2, 64).of_texts.recalled == Recalled(8, 64)
    assert RecallOptions(8, 2).of_texts.recalled == Recalled(8, 2)
    assert RecallOptions().of_texts.recalled is None


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"recall": -1}, "recall"),
        ({"recall": 8, "recall_every": 0}, "recall_every"),
        ({"recall": 8, "recall_while_reading": 0}, "recall_while_reading"),
        ({"recall_every": 2}, "recall_every"),
        ({"recall_while_reading": 2}, "recall_while_reading"),
    ],
)
def test_what_is_refused(values: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError) as refused:
        RecallOptions(**values)
    assert refused.value.name == name
