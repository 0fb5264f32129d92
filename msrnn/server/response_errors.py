"""Errors of chats and sessions, with the names that requests for responses have for fields and items."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msrnn.server.errors import ApiError

_MESSAGE = re.compile(r"\bmessages(?:\[(\d+)\](?:\.\w+)?)?")
_FIELDS = {
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "session_id": "previous_response_id",
    "session_turns": "previous_response_id",
}


def rename_error(error: ApiError, items: Sequence[int] = ()) -> ApiError:
    """The error with the fields of a response. `items`: the number of the item that each message begins with."""

    def rename_message(found: re.Match[str]) -> str:
        return "input" if found[1] is None or not items else f"input[{items[int(found[1])]}]"

    param, message = error.param or "", _MESSAGE.sub(rename_message, error.message)
    renamed = "store" if error.status == 507 else _FIELDS.get(param, _MESSAGE.sub(rename_message, param))
    if param in _FIELDS:
        message = re.sub(rf"\b{param}\b", renamed, message)
    return ApiError(
        error.status, message, kind=error.kind, param=renamed or None, code=error.code, headers=error.headers
    )


def no_previous_error(response: str, newest: str | None = None) -> ApiError:
    """OpenAI's error; `newest`: the response of the same conversation that can be continued."""
    if newest is None:
        reason = "it was not stored, was deleted or has expired, or belongs to another key; send the whole conversation"
    else:
        reason = f"the conversation has gone on, and only its newest response can be continued: {newest}"
    message = f"previous_response_id={response!r:.100}: cannot be found, since {reason}"
    return ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
