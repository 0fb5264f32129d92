from __future__ import annotations

from typing import Any

import pytest

from msrnn.server.errors import ApiError
from msrnn.server.response_ids import parse_response_id
from msrnn.server.response_requests import parse_response
from tests.helpers.live_server import served_by
from tests.helpers.responses import LETTERS, TOOL, make_engine, user

CALL = {"type": "function_call", "call_id": "c1", "name": "find_pet", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Bo"}


@pytest.fixture(scope="module")
def served() -> Any:
    engine = make_engine()
    yield served_by(engine)
    engine.close()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "a list of 1 to 10,000 items"),
        ({"input": 3}, "input", "a text, or a list"),
        ({"input": None}, "input", "a text, or a list"),
        ({"input": [3]}, "input[0]", "must be an object whose type is one of message"),
        ({"input": ["a"]}, "input[0]", "must be an object"),
        ({"input": [{"type": []}]}, "input[0]", "type"),
        ({"input": [{"type": {}}]}, "input[0]", "type"),
        ({"input": [{"type": 3}]}, "input[0]", "type"),
        ({"input": [user("a"), {"type": "computer_call_output"}]}, "input[1].type", "'computer_call_output' is not"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "not supported"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type", "not supported"),
        ({"input": [{"type": "\ud800"}]}, "input[0]", "type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", '"user"'),
        ({"input": [{"role": "user"}]}, "input[0].content", "text, or a list of parts"),
        ({"input": [user("\ud800")]}, "input[0].content", "half of a character"),
        ({"input": [{**user("a"), "phase": "commentary"}]}, "input[0].phase", "not supported"),
        ({"input": [{**user("a"), "\ud800": 1}]}, "input[0]", "must be an object"),
        ({"input": [user("a"), {"role": "user", "content": [{"type": "input_image"}]}]}, "input[1].content", "images"),
        ({"input": [user("a"), {**CALL, "arguments": "[]"}, RESULT]}, "input[1].arguments", "JSON text of an object"),
        ({"input": [user("a"), {**CALL, "call_id": "a b"}, RESULT]}, "input[1].call_id", "1 to 64 letters"),
        ({"input": [user("a"), CALL]}, "input", "the results of c1 are missing"),
        ({"input": [user("a"), CALL, user("b")]}, "input", "input[2]: the results of c1 are missing"),
        ({"input": [user("a"), RESULT]}, "input[1]", "input[1]: 'c1' is no call of the assistant before it"),
        ({"input": [user("a"), CALL, RESULT, user("b"), RESULT]}, "input[4]", "is no call"),
        ({"input": [user("a"), CALL, CALL, RESULT]}, "input[1]", "two have one id"),
        ({"input": [user("a"), *({**CALL, "call_id": f"c{i}"} for i in range(200))]}, "input[1]", "at most 128 calls"),
        ({"input": [user("a"), {"role": "assistant", "content": "b"}]}, "input", "is an answer already"),
        ({"instructions": ["a"]}, "instructions", "instructions"),
        ({"instructions": "\ud800"}, "instructions", "half of a character"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "this server takes 2,000 at most"),
        ({"input": "x" * 3000}, "max_output_tokens", "tokens"),
        ({"temperature": 101}, "temperature", "100"),
        ({"tools": [{"type": "web_search"}]}, "tools", "as web_search, are not supported"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools", "a list of at most 128 functions"),
        ({"tools": [TOOL, TOOL]}, "tools", "the name of two functions"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice", '"name"'),
        ({"tools": [TOOL]}, "tools", "--tool-call-parser"),
        ({"text": {"format": {"type": "xml"}}}, "text", "json_object"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "must be an object"),
        ({"text": {"format": {"type": "json_schema", "name": "\ud800", "schema": {}}}}, "text", "half"),
        ({"text": {"verbosity": "low"}}, "text", "must be an object"),
        ({"reasoning": {"summary": "auto"}}, "reasoning", "may have effort only"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "does not use it"),
        ({"metadata": {"a": 3}}, "metadata", "16 texts"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "16 texts"),
        ({"metadata": {"a": "\ud800"}}, "metadata", "half"),
        ({"truncation": "middle"}, "truncation", '"auto", or "disabled"'),
        ({"store": 1}, "store", "true or false"),
        ({"previous_response_id": 3}, "previous_response_id", "previous_response_id"),
        ({"previous_response_id": "\ud800"}, "previous_response_id", "cannot be found"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
        ({"max_tool_calls": 3}, "max_tool_calls", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "not supported"),
        ({"messages": [user("a")]}, "messages", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"session_id": "ann"}, "session_id", "not supported"),
    ],
)
def test_what_is_refused(served: Any, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_response({"input": "a", **fields}, served)
    assert error.value.status == 400
    assert str(error.value.param).startswith(param)
    assert words in error.value.message
    assert str(error.value.body).encode()


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_is_an_object(served: Any, body: Any) -> None:
    with pytest.raises(ApiError, match="must be a JSON object"):
        parse_response(body, served)


def test_the_model_has_a_name(served: Any) -> None:
    with pytest.raises(ApiError, match="is not served here") as error:
        parse_response({"input": "a", "model": "large"}, served)
    assert error.value.status == 404


def test_null_counts_as_not_given(served: Any) -> None:
    fields = dict.fromkeys(
        ("instructions", "previous_response_id", "store", "max_output_tokens", "tools", "tool_choice", "text")
    )
    nulls = {**user("a"), "type": None, "status": None, "phase": None}
    job = parse_response({"input": [nulls], **fields, "reasoning": {"effort": None}, "metadata": None}, served)
    plain = parse_response({"input": "a"}, served)
    assert (job.prompts, job.params.max_tokens) == (plain.prompts, plain.params.max_tokens)
    volatile = {"id", "created_at"}
    assert {k: v for k, v in job.shown.items() if k not in volatile} == {
        k: v for k, v in plain.shown.items() if k not in volatile
    }


def test_what_others_ask_for_and_happens_anyway(served: Any) -> None:
    usual = {"background": False, "include": [], "service_tier": "auto", "truncation": "auto", "user": "ann"}
    usual |= {"prompt_cache_key": "x", "stream_options": {"include_obfuscation": False}}
    job = parse_response({"input": "a", **usual, "text": {"verbosity": "medium"}}, served)
    assert job.shown["truncation"] == "auto"


def test_a_conversation_begins_as_a_session(served: Any) -> None:
    job = parse_response({"input": "a", "instructions": "be brief"}, served)
    found = parse_response_id(job.shown["id"])
    assert found is not None
    assert (job.session, job.turns, found.turn) == (found.session, 0, 1)
    assert job.beginning.startswith(".")
    assert len(job.beginning) <= 64  # what a session's file may have
    other = parse_response({"input": "a", "store": False}, served)
    assert (other.session, parse_response_id(other.shown["id"])) == (None, None)


def test_what_is_shown_is_what_holds(served: Any) -> None:
    form = {"type": "json_schema", "name": "x", "schema": LETTERS, "strict": True}
    body = {"input": "a", "temperature": 0.5, "metadata": {"a": "b"}, "text": {"format": form}, "max_output_tokens": 9}
    job = parse_response(body, served)
    shown = job.shown
    assert (shown["temperature"], shown["top_p"], shown["max_output_tokens"]) == (0.5, 1.0, 9)
    assert (shown["metadata"], shown["model"]) == ({"a": "b"}, "tiny")
    assert shown["text"]["format"] == {**form, "description": ""}
    assert job.params.max_tokens == 9
    assert job.constrained_by == "text"
