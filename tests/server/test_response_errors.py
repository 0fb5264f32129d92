"""Errors of responses name the fields of responses, over HTTP and in streams as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from msrnn.server.errors import ApiError, bad_value, session_error
from msrnn.server.response_errors import no_previous_error, rename_error
from tests.helpers.live_server import KEY, Live, live, post, slow_down
from tests.helpers.responses import make_engine


@pytest.fixture(scope="module")
def served() -> Iterator[Live]:
    with live(make_engine()) as found:
        yield found


def refuse(served: Live, **fields: Any) -> Any:
    return post(served.address, {"input": "hello", **fields}, "/v1/responses").json()["error"]


@pytest.mark.parametrize(
    ("param", "message", "renamed", "words"),
    [
        ("max_tokens", "max_tokens: must be 1", "max_output_tokens", "max_output_tokens: must be 1"),
        ("session_id", "session_id: of session_id", "previous_response_id", "previous_response_id: of session_id"),
        ("messages[1].tool_calls", "messages[1].tool_calls: two have one id", "input[4]", "input[4]: two have one id"),
        ("messages", "messages[0]: 'messages', and messages", "input", "input[2]: 'messages', and input"),
        ("response_format", "response_format and tools both", "text", "text and tools both"),
        ("session_id", "session 'resp_1': is in use", "previous_response_id", "session 'resp_1': is in use"),
        ("tools", "tools: 'messages', response_format", "tools", "tools: 'messages', response_format"),
        ("input[4]", "input[4]: two have one id", "input[4]", "input[4]: two have one id"),
    ],
)
def test_names_of_fields(param: str, message: str, renamed: str, words: str) -> None:
    found = rename_error(bad_value(param, message), [2, 4])
    assert (found.param, found.message, found.status, found.code) == (renamed, words, 400, "invalid_value")
    again = rename_error(found)
    assert (again.param, again.message) == (renamed, words)


def test_the_rest_of_an_error_stays() -> None:
    error = ApiError(429, "too many", kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
    found = rename_error(error)
    assert (found.body, found.status, found.headers) == (error.body, 429, error.headers)
    assert rename_error(session_error("no room", "session_storage_full")).param == "store"


def test_a_previous_response_that_is_not_there() -> None:
    gone, old = no_previous_error("resp_1"), no_previous_error("resp_1", "resp_2")
    assert {one.code for one in (gone, old)} == {"previous_response_not_found"}
    assert "has expired" in gone.message
    assert old.message.endswith("can be continued: resp_2")


@pytest.mark.parametrize("name", ["messages", "max_tokens", "session_id", "response_format"])
def test_fields_of_chats_are_refused_by_their_own_names(served: Live, name: str) -> None:
    error = refuse(served, **{name: 3})
    assert (error["param"], error["code"]) == (name, "unsupported_field")
    assert error["message"].startswith(repr(name))


def test_a_schema_that_cannot_be_followed(served: Live) -> None:
    error = refuse(served, text={"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}})
    assert (error["param"], error["message"].startswith("text: ")) == ("text", True)


def test_an_error_in_a_stream_is_raised(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = slow_down(served.server.engine, monkeypatch)
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0)
    about: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 500, "extra_body": {"ignore_eos": True}}
    stream = client.responses.create(**about, stream=True)
    assert next(stream).type == "response.created"
    served.server.end_answers()
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    fast.set()
