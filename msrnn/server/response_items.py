"""Items of a request for a response, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msrnn.server.item_models import AnyItem, CallItem, Content, MessageItem, ResultItem


class NumberedMessage(NamedTuple):
    message: dict[str, Any]
    item: int  # the number of its first item


def make_messages(items: Sequence[AnyItem]) -> list[NumberedMessage]:
    """The messages that items are.

    A call belongs to the answer right before it, and so does what follows it up to the results: an answer that calls is
    one message with its text and its calls.
    """
    found: list[NumberedMessage] = []
    for number, item in enumerate(items):
        before = found[-1].message if found else {}
        if isinstance(item, ResultItem):
            message: dict[str, Any] = {"role": "tool", "tool_call_id": item.call_id, "content": join_parts(item.output)}
        elif isinstance(item, CallItem):
            if before.get("role") == "assistant":
                before.setdefault("tool_calls", []).append(_show_call(item))
                continue
            message = {"role": "assistant", "content": "", "tool_calls": [_show_call(item)]}
        else:
            if item.role == "assistant" and "tool_calls" in before:
                before["content"] += join_parts(item.content)
                continue
            message = {"role": item.role, "content": join_parts(item.content)}
        found.append(NumberedMessage(message, number))
    return found


def is_answer(item: AnyItem) -> bool:
    """Whether an item is text that a response has said."""
    return isinstance(item, MessageItem) and item.role == "assistant"


def join_parts(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _show_call(item: CallItem) -> dict[str, Any]:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
