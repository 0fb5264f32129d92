from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from msrnn.server.refusals import must_be, properties, refusal
from msrnn.server.request_models import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 20}, "a whole number, from 0 to 20"),
        ({"type": "number", "minimum": -2, "maximum": 2}, "a number from -2 to 2"),
        ({"type": "boolean"}, "true or false"),
        ({"type": "string", "maxLength": 1000}, "a string of at most 1,000 characters"),
        ({"enum": ["text", 1]}, '"text", or 1'),
        ({"const": "text"}, '"text"'),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, "true or false"),
        ({"type": "array", "x-must": "a list of words"}, "a list of words"),
        ({}, "anything"),
    ],
)
def test_what_a_field_must_be(schema: dict[str, Any], words: str) -> None:
    assert must_be(schema) == words


def refused(kind: type[Any], body: dict[str, Any]) -> tuple[str | None, str]:
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    found = refusal(error.value, kind, body)
    assert (found.status, found.code) == (400, "invalid_value")
    return found.param, found.message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n=0: must be a whole number, from 1 to 2,147,483,647"),
        ("n", True, "n=True: must be a whole number"),
        ("temperature", "1", "temperature='1': must be a number from 0 to 100"),
        ("stop", [""], "must be a string or a list of at most 16 strings"),
        ("logit_bias", {"a": 1}, "must be an object from token ids to numbers from -100 to 100"),
        ("session_id", "a b", "session_id='a b': must be 1 to 64 letters"),
        ("prompt", [], "prompt=[]: must be a text, a list of token ids, or a list of either"),
        ("prompt", "\ud800", "prompt: has half of a character (a lone surrogate) at 0"),
        ("prompt", ["a", "b\ud800"], "prompt: has half of a character (a lone surrogate) at 1"),
        ("stream_options", 3, "must be an object, and may have include_usage"),
    ],
)
def test_the_field_and_what_is_wrong_with_it(field: str, value: Any, message: str) -> None:
    param, found = refused(CompletionRequest, {"prompt": "a", field: value})
    assert param == field
    assert message in found


def test_an_option_of_the_stream() -> None:
    found = refused(CompletionRequest, {"prompt": "a", "stream_options": {"include_usage": 1}})
    assert found == ("include_usage", "include_usage must be true or false")


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "robot", "content": "a"}, "messages[1]", "must be an object whose role is one of system, developer"),
        ("hello", "messages[1]", "must be an object whose role is one of"),
        ({"role": "user", "content": 3}, "messages[1].content", "content must be text, or a list of parts"),
        ({"role": "user", "content": "\ud800"}, "messages[1].content", "half of a character"),
        (
            {"role": "user", "content": "a", "tool_calls": [3]},
            "messages[1].tool_calls",
            "only messages of the assistant have calls",
        ),
        ({"role": "assistant", "tool_calls": [3]}, "messages[1].tool_calls", "a list of at most 128 calls"),
        ({"role": "tool", "content": "a", "tool_call_id": "é"}, "messages[1].tool_call_id", "1 to 64 letters"),
        ({"role": "user", "content": "a", "é": 3}, r"messages[1].\xe9", "'é' is not supported"),
    ],
)
def test_the_message_and_what_is_wrong_with_it(message: Any, param: str, words: str) -> None:
    found = refused(ChatRequest, {"messages": [{"role": "user", "content": "a"}, message]})
    assert found[0] == param
    assert words in found[1]


def test_a_field_that_is_not_given() -> None:
    assert refused(ChatRequest, {}) == ("messages", "messages: must be a list of 1 to 10,000 messages")


def test_every_field_can_be_described() -> None:
    for kind in (ChatRequest, CompletionRequest):
        assert [name for name, schema in properties(kind).items() if must_be(schema) == "anything"] == []
