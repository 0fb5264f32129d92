from __future__ import annotations

from typing import Any

import pytest

from msrnn.server.usual_fields import (
    MOST_NAME,
    NOT_USED_IN_CHATS,
    NOT_USED_IN_COMPLETIONS,
    NOT_USED_IN_MESSAGES,
    allows,
)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("store", False, True),
        ("store", 0, False),
        ("priority", 0, True),
        ("priority", False, False),
        ("length_penalty", 1, True),
        ("length_penalty", 1.0, True),
        ("length_penalty", True, False),
        ("functions", [], True),
        ("functions", [{}], False),
        ("prompt_cache_key", "x" * MOST_NAME, True),
        ("prompt_cache_key", "x" * (MOST_NAME + 1), False),
        ("prompt_cache_key", 3, False),
    ],
)
def test_values_that_ask_for_what_happens_anyway(name: str, value: Any, allowed: bool) -> None:
    assert allows(NOT_USED_IN_CHATS[name], value) is allowed


def test_special_tokens_are_added_to_prompts_and_not_to_chats() -> None:
    assert allows(NOT_USED_IN_COMPLETIONS["add_special_tokens"], True)
    assert not allows(NOT_USED_IN_CHATS["add_special_tokens"], True)


def test_every_schema_can_be_checked() -> None:
    for schema in (*NOT_USED_IN_CHATS.values(), *NOT_USED_IN_COMPLETIONS.values(), *NOT_USED_IN_MESSAGES.values()):
        assert not allows(schema, object())
