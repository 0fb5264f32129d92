from __future__ import annotations

from typing import Any

import pytest

from msrnn.server.errors import ApiError
from msrnn.server.message_models import Message
from msrnn.server.tool_messages import check_history, order_results, show_message
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.tool_templates import tool_tokenizer

USER: dict[str, Any] = {"role": "user", "content": "hi"}


def call(*ids: str) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(number: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": "x"}


def check(*messages: dict[str, Any], begins: bool = True, knows: bool = True, tools: bool = True) -> None:
    tokenizer = tool_tokenizer("hermes") if knows else byte_tokenizer()
    check_history([Message.model_validate(message) for message in messages], tokenizer, begins, tools)


def test_calls_with_their_results() -> None:
    check(USER, call("a", "b"), result("b"), result("a"), USER, call("a"), result("a"))
    check(result("a"), begins=False)
    check(USER, USER, knows=False)
    check(USER, {"role": "assistant", "content": "so", "tool_calls": []}, knows=False)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, call("a")], "messages"),
        ([USER, call("a", "b"), result("a")], "messages"),
        ([USER, call("a"), USER], "messages"),
        ([USER, call("a"), result("b")], "messages[2].tool_call_id"),
        ([USER, call("a"), result("a"), result("a")], "messages[3].tool_call_id"),
        ([USER, result("a")], "messages[1].tool_call_id"),
        ([result("a")], "messages[0].tool_call_id"),
        ([USER, call("a", "a"), result("a")], "messages[1].tool_calls"),
    ],
)
def test_calls_and_results_that_do_not_belong_together(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as error:
        check(*messages)
    assert (error.value.status, error.value.param) == (400, param)


def test_a_template_that_writes_no_calls() -> None:
    with pytest.raises(ApiError, match="does not write calls of tools"):
        check(USER, call("a"), result("a"), knows=False)


def test_results_are_in_the_order_of_their_calls() -> None:
    """Many templates do not write ids, and a result would seem to be that of another call."""
    results = [result("b"), result("c"), result("a")]
    given = [USER, call("c", "b"), *results[:2], USER, call("b", "a"), results[2], results[0], USER]
    found = order_results([Message.model_validate(message) for message in given])
    assert [message.tool_call_id for message in found] == [None, None, "c", "b", None, None, "b", "a", None]
    assert [message.role for message in found] == [message["role"] for message in given]
    later = [Message.model_validate(message) for message in results]  # of a session's calls
    assert order_results(later) == later


def test_messages_as_templates_take_them() -> None:
    names: dict[str, str] = {}
    shown = [show_message(Message.model_validate(one), names) for one in (USER, call("a"), result("a"), result("b"))]
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert shown == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_call_id": "a", "name": "f"},
        {"role": "tool", "content": "x", "tool_call_id": "b"},
    ]
    developer = Message.model_validate({"role": "developer", "content": "be kind"})
    assert show_message(developer, {}) == {"role": "system", "content": "be kind"}
