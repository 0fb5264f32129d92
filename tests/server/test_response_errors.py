from __future__ import annotations

import pytest

from msrnn.server.errors import ApiError, bad_value, session_error
from msrnn.server.response_errors import no_previous_error, rename_error


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
