"""The options of recall: what cannot be is refused, with the name of the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.recall import Recall


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rows": 0}, "recall"),
        ({"rows": 1.5}, "recall"),
        ({"rows": True}, "recall"),
        ({"rows": 8, "every": 0}, "recall_every"),
        ({"rows": 8, "archive": ""}, "archive"),
        ({"rows": 8, "archive": 3}, "archive"),
        ({"rows": 8, "search": "fast"}, "search"),
        ({"rows": 8, "limit": 0}, "archive_bytes"),
    ],
)
def test_refusals(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Recall(**options)


def test_an_archive_is_in_memory_or_in_a_folder(tmp_path: Path) -> None:
    assert Recall(8).folder is None
    assert Recall(8, archive="device").folder is None
    assert Recall(8, archive=str(tmp_path)).folder == tmp_path
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="is a file"):
        Recall(8, archive=str(file))


def test_states_of_the_same_name_fit() -> None:
    assert Recall(8).name == Recall(8, every=4, archive="device").name
    assert len({Recall(8).name, Recall(16).name, Recall(8, state_dtype="int8").name}) == 3
