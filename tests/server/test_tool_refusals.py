"""Requests with tools that are refused: what is wrong, and in which field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import msrnn
from msrnn.server.call_detection import find_format
from tests.helpers.byte_tokenizer import byte_model
from tests.helpers.live_server import live
from tests.helpers.tool_requests import CALL, CALLED, RESULT, TOOL, USER, ask
from tests.helpers.tool_templates import tool_tokenizer


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    tokenizer = tool_tokenizer("hermes")
    engine = msrnn.Engine(msrnn.MultiStateRNN(byte_model(), "tova", 16), slots=1, tokenizer=tokenizer)
    with live(engine, calls=find_format(tokenizer)) as found:
        yield found.address


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools", "a list of at most 128 functions"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "1 to 64 letters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]}, "tools", ""),
        ({"tools": [TOOL, TOOL]}, "tools", "the name of two functions"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "maybe"}, "tool_choice", '"none", "auto", "required"'),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not the name of one"),
        ({"response_format": {"type": "json_object"}}, "response_format", "give tool_choice none"),
        ({"messages": [USER, CALLED]}, "messages", "the results of abcdefghi are missing"),
        ({"messages": [USER, CALLED, USER]}, "messages", "messages[2]: the results of abcdefghi are missing"),
        ({"messages": [USER, RESULT]}, "messages[1].tool_call_id", "is no call of the assistant"),
        ({"messages": [USER, CALLED, RESULT, RESULT]}, "messages[3].tool_call_id", "is no call"),
        ({"messages": [USER, {**CALLED, "tool_calls": [CALL, CALL]}, RESULT]}, "messages[1].tool_calls", "one id"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "only messages of the assistant"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "the role tool have it"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content", "must be text"),
        ({"messages": [USER, {"role": "assistant", "content": "so"}]}, "tools", "add_generation_prompt true"),
    ],
)
def test_what_is_refused(address: str, fields: dict[str, Any], param: str, words: str) -> None:
    error = ask(address, **fields)
    assert (error["param"], words in error["message"]) == (param, True), error["message"]


@pytest.mark.parametrize("arguments", ["", "[]", "{", '{"a": NaN}', '{"a": 1e999}', "[" * 9999, '{"a": "\\ud800"}'])
def test_arguments_that_are_no_object(address: str, arguments: str) -> None:
    call = {**CALL, "function": {"name": "find_pet", "arguments": arguments}}
    error = ask(address, messages=[USER, {**CALLED, "tool_calls": [call]}, RESULT])
    assert error["param"] == "messages[1].tool_calls"


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"not": {}}}},
        {"type": "object", "properties": {"a": {"pattern": "(" * 500}}},
        {"type": "object", "description": "x" * 70_000},
    ],
)
def test_schemas_that_cannot_be_followed(address: str, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    error = ask(address, tools=tools, tool_choice="required")
    assert (error["param"], error["code"]) == ("tools", "invalid_value"), error


def test_deep_schemas(address: str) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    error = ask(address, tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}])
    assert error["param"] == "tools"
