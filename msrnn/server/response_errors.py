"""Errors of chats and sessions, with the names that requests for responses have for fields and items."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msrnn.server.errors import ApiError

_MESSAGE = re.compile(r"(?<!')\bmessages(?:\[(\d+)\](?:\.\w+)?)?")
_FIELDS = {
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "session_id": "previous_response_id",
    "session_turns": "previous_response_id",
}


def rename_error(error: ApiError, items: Sequence[int] = ()) -> ApiError:
    """An error of a chat. `items`: the number of the item that each message begins with."""
    param, message = error.param or "", error.message
    if param.startswith("messages"):
        param, message = (_rename_messages(text, items) for text in (param, message))
    elif param in _FIELDS:
        param = "store" if error.status == 507 else _FIELDS[param]
        message = re.sub(rf"^{error.param}\b", param, message)
    return ApiError(error.status, message, kind=error.kind, param=param or None, code=error.code, headers=error.headers)


def _rename_messages(text: str, items: Sequence[int]) -> str:
    return _MESSAGE.sub(lambda found: "input" if found[1] is None else f"input[{items[int(found[1])]}]", text)


def no_previous_error(response: str, newest: str | None = None) -> ApiError:
    """OpenAI's error; `newest`: the response of the same conversation that can be continued."""
    if newest is None:
        reason = "it was not stored, was deleted or has expired, or belongs to another key; send the whole conversation"
    else:
        reason = f"the conversation has gone on, and only its newest response can be continued: {newest}"
    message = f"previous_response_id={response!r:.100}: cannot be found, since {reason}"
    return ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
