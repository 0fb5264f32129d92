"""The output of a response: its items, and the events of a stream that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from msrnn.server.answer_calls import AnswerCalls, make_call_id
from msrnn.server.call_parser import Call
from msrnn.server.tools import CallSearch

STATUSES = {"stop": "completed", "length": "incomplete", "cancelled": "cancelled"}  # by the reason why an answer ended
Event = dict[str, Any]


class ResponseOutput:
    """Items in the order of the answer: text is in messages, and each call is an item."""

    def __init__(self, search: CallSearch | None) -> None:
        self.items: list[dict[str, Any]] = []  # those that are complete
        self._calls = AnswerCalls(search)
        self._text: list[str] | None = None  # of the message that is open
        self._id = ""  # of this message

    def read(self, text: str, reason: str | None) -> Iterator[Event]:
        """The events for the next text; `reason`: why the answer ends with it, or None."""
        for found in self._calls.read(text, ends=reason is not None):
            if isinstance(found, Call):
                yield from self._end_message("completed")
                yield from self._add_call(found)
            else:
                yield from self._add_text(found)
        if reason is not None:
            if not self.items and self._text is None:
                yield from self._begin_message()
            yield from self._end_message("completed" if reason == "stop" else "incomplete")

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.items)}

    def _begin_message(self) -> Iterator[Event]:
        self._id, self._text = _make_id("msg"), []
        message = {"id": self._id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield {"type": "response.output_item.added", "output_index": len(self.items), "item": message}
        yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": _make_part("")}

    def _add_text(self, text: str) -> Iterator[Event]:
        if self._text is None:
            yield from self._begin_message()
        assert self._text is not None
        self._text.append(text)
        place = {**self._place, "content_index": 0}
        yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}

    def _end_message(self, status: str) -> Iterator[Event]:
        if self._text is None:
            return
        part, place = _make_part("".join(self._text)), {**self._place, "content_index": 0}
        yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": part}
        message = {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": [part]}
        self._text = None
        yield from self._end_item(message)

    def _add_call(self, call: Call) -> Iterator[Event]:
        self._id = _make_id("fc")
        item = {"id": self._id, "type": "function_call", "call_id": make_call_id(), "name": call.name}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield {"type": "response.output_item.added", "output_index": len(self.items), "item": begun}
        yield {"type": "response.function_call_arguments.delta", **self._place, "delta": call.arguments}
        done = {**self._place, "name": call.name, "arguments": call.arguments}
        yield {"type": "response.function_call_arguments.done", **done}
        yield from self._end_item({**item, "status": "completed", "arguments": call.arguments})

    def _end_item(self, item: dict[str, Any]) -> Iterator[Event]:
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)


def _make_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _make_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
