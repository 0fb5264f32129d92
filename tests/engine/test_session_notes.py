from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msrnn.engine.session_notes import check_notes
from msrnn.errors import FileError

NOTES: dict[str, Any] = {"unread": [5, 7], "last": 7, "turns": 2, "created": 1.5, "updated": 2}
FILE = Path("talk.safetensors")


def test_notes_of_a_session() -> None:
    assert check_notes({**NOTES, "more": "is ignored"}, FILE) == NOTES


def test_what_a_session_begins_with() -> None:
    assert check_notes({**NOTES, "beginning": "abc"}, FILE)["beginning"] == "abc"
    with pytest.raises(FileError):
        check_notes({**NOTES, "beginning": "a" * 65}, FILE)


@pytest.mark.parametrize(("unread", "last"), [([5, 7], 7), ([], None)])
def test_an_old_file_has_no_last_token(unread: list[int], last: int | None) -> None:
    old = {name: value for name, value in NOTES.items() if name != "last"}
    assert check_notes({**old, "unread": unread}, FILE)["last"] == last


@pytest.mark.parametrize(
    "wrong",
    [
        {"turns": -1},
        {"turns": True},
        {"turns": 2.0},
        {"unread": [2**63]},
        {"created": float("nan")},
        {"updated": "now"},
    ],
)
def test_damaged_notes(wrong: dict[str, Any]) -> None:
    with pytest.raises(FileError, match=r"talk\.safetensors: not a session that the engine saved"):
        check_notes({**NOTES, **wrong}, FILE)


def test_an_engine_without_session_files_does_not_load_pydantic() -> None:
    code = "import sys, msrnn.engine.engine, msrnn.engine.sessions; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
