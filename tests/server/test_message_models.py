from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from msrnn.server.message_models import Message

HELLO = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_messages_as_clients_send_them_back() -> None:
    sent: dict[str, Any] = {**HELLO, "name": "Ann", "refusal": None, "annotations": [], "tool_calls": []}
    found = Message.model_validate(sent)
    assert (found.role, found.text) == ("user", "hi")
    parts = [{"type": "text", "text": "a", "cache": 1}, {"type": "text", "text": "b"}]
    assert Message.model_validate({"role": "user", "content": parts}).text == "ab"


@pytest.mark.parametrize(
    "change",
    [
        {"role": "tool"},
        {"content": None},
        {"content": []},
        {"content": [{"type": "image_url", "image_url": "a"}]},
        {"tool_calls": [{}]},
        {"refusal": "no"},
    ],
)
def test_messages_that_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate({**HELLO, **change})


def test_calls_and_results() -> None:
    called = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None})
    assert (called.text, [call.id for call in called.tool_calls]) == ("", ["a"])
    result = Message.model_validate({"role": "tool", "tool_call_id": "a", "content": "", "name": "f"})
    assert (result.text, result.tool_call_id) == ("", "a")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "so", "tool_call_id": "a"},
        {"role": "user", "content": "so", "tool_calls": [CALL]},
        {"role": "tool", "content": "so"},
        {"role": "tool", "content": None, "tool_call_id": "a"},
        {"role": "assistant", "tool_calls": [CALL] * 129},
        {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
    ],
)
def test_calls_and_results_that_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate(message)
