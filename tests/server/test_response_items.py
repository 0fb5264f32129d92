from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from msrnn.server.item_models import Items
from msrnn.server.response_items import is_answer, join_parts, make_messages

USER = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Bo"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GIVEN = {"role": "tool", "tool_call_id": "c1", "content": "Bo"}


def answer(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}


def said(content: str, *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": [*calls]} if calls else {})}


@pytest.mark.parametrize(
    ("items", "messages", "numbers"),
    [
        ("a", [USER], [0]),
        ([USER, answer("b"), USER], [USER, said("b"), USER], [0, 1, 2]),
        ([USER, answer("b"), answer("c"), USER], [USER, said("b"), said("c"), USER], [0, 1, 2, 3]),
        ([USER, CALL, RESULT], [USER, said("", CALLED), GIVEN], [0, 1, 2]),
        ([USER, answer("b"), CALL, RESULT, USER], [USER, said("b", CALLED), GIVEN, USER], [0, 1, 3, 4]),
        ([USER, answer("b"), CALL, answer("c"), RESULT], [USER, said("bc", CALLED), GIVEN], [0, 1, 4]),
        ([USER, CALL, CALL, RESULT, RESULT], [USER, said("", CALLED, CALLED), GIVEN, GIVEN], [0, 1, 3, 4]),
        ([USER, CALL, RESULT, CALL, RESULT], [USER, said("", CALLED), GIVEN, said("", CALLED), GIVEN], [0, 1, 2, 3, 4]),
        ([USER, CALL, RESULT, answer("b")], [USER, said("", CALLED), GIVEN, said("b")], [0, 1, 2, 3]),
        ([{**RESULT, "output": [{"type": "input_text", "text": "Bo"}]}], [GIVEN], [0]),
    ],
)
def test_messages(items: Any, messages: Any, numbers: Any) -> None:
    found = make_messages(TypeAdapter(Items).validate_python(items, strict=True))
    assert [one.message for one in found] == messages
    assert [one.item for one in found] == numbers


def test_answers_and_their_texts() -> None:
    items = TypeAdapter(Items).validate_python([USER, answer("b"), CALL, RESULT], strict=True)
    assert [is_answer(item) for item in items] == [False, True, False, False]
    assert (join_parts("a"), join_parts(items[1].content)) == ("a", "b")  # type: ignore[union-attr]
