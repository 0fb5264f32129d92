"""Calls and their results in messages: whether they belong together, and as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msrnn.errors import UsageError
from msrnn.hf.tool_template import check_calls
from msrnn.server.errors import bad_value
from msrnn.server.message_models import Message
from msrnn.server.tool_models import ToolCall, parse_arguments


def check_history(messages: Sequence[Message], tokenizer: Any, begins: bool, tools: bool) -> None:
    """Refuse calls without results and results without calls, and a template that writes neither.

    begins  whether the messages begin a conversation; otherwise the first ones may be results of calls before them
    tools   whether the template is given tools
    """
    if not any(message.tool_calls or message.role == "tool" for message in messages):
        return
    try:
        check_calls(tokenizer, tools)
    except UsageError as error:
        raise bad_value("messages", str(error)) from error
    waiting: set[str] | None = set() if begins else None  # calls without a result; None: not known
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role == "tool":
            if waiting is not None and message.tool_call_id not in waiting:
                problem = f"{message.tool_call_id!r} is no call of the assistant before it that waits for its result"
                raise bad_value(f"{where}.tool_call_id", f"{where}.tool_call_id: {problem}")
            if waiting is not None:
                waiting.discard(str(message.tool_call_id))
            continue
        if waiting:
            raise _no_result_error(where, waiting)
        waiting = {call.id for call in message.tool_calls}
        if len(waiting) < len(message.tool_calls):
            raise bad_value(f"{where}.tool_calls", f"{where}.tool_calls: two have one id; give each its own")
    if waiting:
        raise _no_result_error("the end of messages", waiting)


def _no_result_error(where: str, waiting: set[str]) -> Exception:
    problem = f"{where}: the results of {', '.join(sorted(waiting))} are missing; send one for each"
    return bad_value("messages", problem[:500])


def order_results(messages: Sequence[Message]) -> list[Message]:
    """The messages, with results in the order of their calls, since many templates do not write ids.

    The calls of a session are not known, so their results stay in their order.
    """
    keys, turn, places = list[tuple[int, int]](), 0, dict[str, int]()
    for number, message in enumerate(messages):
        if message.role == "tool":
            keys.append((turn, places.get(str(message.tool_call_id), 0)))
            continue
        turn, places = number, {call.id: place for place, call in enumerate(message.tool_calls)}
        keys.append((turn, -1))
    return [messages[number] for number in sorted(range(len(messages)), key=keys.__getitem__)]


def show_message(message: Message, names: dict[str, str]) -> dict[str, Any]:
    """A message as chat templates take it. `names` has the function of each call so far, and gets those of this one."""
    shown: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "developer":
        shown["role"] = "system"
    if message.tool_calls:
        shown["tool_calls"] = [_show_call(call) for call in message.tool_calls]
        names |= {call.id: call.function.name for call in message.tool_calls}
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
        if message.tool_call_id in names:
            shown["name"] = names[message.tool_call_id]
    return shown


def _show_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}
