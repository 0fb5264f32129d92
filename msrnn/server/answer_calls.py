"""The calls of tools in an answer, as chat completions have them: in a message, or in the deltas of a stream."""

from __future__ import annotations

import secrets
import string
from typing import Any

from msrnn.server.call_parser import Call, Found
from msrnn.server.tools import CallSearch

_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # what chat templates of Mistral want; others take any id


class AnswerCalls:
    """Builds the parts of one answer; without a search, all of it is content."""

    def __init__(self, search: CallSearch | None) -> None:
        self._parser = None if search is None else search.make_parser()
        self._count = 0  # calls that were found

    def make_message(self, text: str) -> dict[str, Any]:
        """The message of a whole answer. Its content is null if it has calls alone."""
        found = self.read(text, ends=True)
        content = "".join(one for one in found if isinstance(one, str))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls := [one for one in found if isinstance(one, Call)]:
            message["content"] = content or None
            message["tool_calls"] = [_describe_call(call) for call in calls]
            self._count = len(calls)
        return message

    def list_deltas(self, text: str, ends: bool) -> list[dict[str, Any]]:
        """The deltas for the next text of a stream. A call is two: its name, and its arguments."""
        deltas: list[dict[str, Any]] = []
        for one in self.read(text, ends):
            if isinstance(one, str):
                deltas.append({"content": one})
                continue
            begun = _describe_call(one._replace(arguments=""))
            deltas.append({"tool_calls": [{"index": self._count, **begun}]})
            deltas.append({"tool_calls": [{"index": self._count, "function": {"arguments": one.arguments}}]})
            self._count += 1
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended; it has been read to its end."""
        return "tool_calls" if reason == "stop" and self._count else reason

    def read(self, text: str, ends: bool) -> list[Found]:
        """The content and the calls that are certain after the next text."""
        if self._parser is None:
            return [text] if text else []
        return [*self._parser.put(text), *(self._parser.end() if ends else ())]


def make_call_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))


def _describe_call(call: Call) -> dict[str, Any]:
    return {"id": make_call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
