"""Errors as data: fields and types carry what code decides by, and the text is composed from them."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.errors import (
    ABSENT,
    DoesNotFitError,
    FileError,
    SessionError,
    SessionStorageFullError,
    UsageError,
    show,
)

TEXTS: list[tuple[UsageError, str]] = [
    (UsageError("too few"), "too few"),
    (UsageError("too few", advice="use more"), "too few; use more"),
    (UsageError("too few", name="size", value=0), "size=0: too few"),
    (UsageError("unknown", name="size", value=None, advice="give one"), "size=None: unknown; give one"),
    (UsageError("17 strings", name="stop", advice="at most 16"), "stop: 17 strings; at most 16"),
    (FileError("empty", Path("a/b"), advice="give a text"), "a/b: empty; give a text"),
    (SessionError("is new", "ann", advice="wait"), "'ann': is new; wait"),
    (DoesNotFitError("takes 9 GB"), "takes 9 GB"),
]


@pytest.mark.parametrize(("error", "text"), TEXTS)
def test_the_text_is_composed_from_the_fields(error: UsageError, text: str) -> None:
    assert str(error) == text


@pytest.mark.parametrize("error", [error for error, _ in TEXTS])
def test_another_process_gets_the_same_error(error: UsageError) -> None:
    other = pickle.loads(pickle.dumps(error))
    assert (type(other), str(other), other.__dict__) == (type(error), str(error), error.__dict__)
    assert (other.value is ABSENT) == (error.value is ABSENT)


def test_kinds_of_session_errors_have_codes() -> None:
    kinds: list[type[SessionError]] = [SessionError, *SessionError.__subclasses__()]
    assert len({kind.code for kind in kinds}) == len(kinds) == 5
    assert SessionStorageFullError.code == "session_storage_full"


@pytest.mark.parametrize("value", [0, True, -(10**400), "a" * 99, [1, [2, {"a": (3,)}]], None, 1e300])
def test_short_values_are_shown_as_they_are(value: Any) -> None:
    assert show(value) == repr(value)[:100] or len(repr(value)) > 100


def test_a_large_or_deep_value_is_cut() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for value in (deep, [*range(10**6)], {str(i): i for i in range(10**5)}, "x" * 10**6):
        assert len(show(value)) <= 100


def test_nobody_writes_a_name_and_a_value_into_a_message() -> None:
    """`UsageError(f"size={size}: …")` would hide both from code; the fields compose that text."""
    wrong = []
    for path in Path(msrnn.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "UsageError" and node.args:
                text = node.args[0]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                first = getattr(parts[0], "value", "")
                if isinstance(first, str) and first[:-1].isidentifier() and first.endswith("="):
                    follows = getattr(parts[2], "value", "") if len(parts) > 2 else ""
                    wrong += [f"{path}:{node.lineno}"] if str(follows).startswith(": ") else []
    assert wrong == []
