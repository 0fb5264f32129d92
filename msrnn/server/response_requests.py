"""Requests for responses as chats: items are messages, and a conversation is a session."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from msrnn.engine.session_files import SessionInfo
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import Sessions
from msrnn.server.beginnings import Beginning, digest
from msrnn.server.errors import ApiError, bad_value
from msrnn.server.fields import read_request
from msrnn.server.protocol import Job, Served, parse_chat
from msrnn.server.request_models import SamplingFields, TemplateVariables
from msrnn.server.response_errors import no_previous_error, rename_error
from msrnn.server.response_ids import ResponseId, make_session_name, parse_response_id
from msrnn.server.response_items import is_answer, make_messages
from msrnn.server.response_models import NamedFunction, PlainFormat, ResponseRequest
from msrnn.server.usual_fields import NOT_USED_IN_RESPONSES

_SAME = (*SamplingFields.model_fields, *TemplateVariables.model_fields, "parallel_tool_calls")


class _Conversation(NamedTuple):
    id: str  # of the response
    beginning: Beginning
    session: Mapping[str, Any]  # the fields of the chat


def parse_response(body: Any, served: Served, owner: str = "") -> Job:
    request = read_request(ResponseRequest, body, NOT_USED_IN_RESPONSES, served.name)
    if is_answer(request.input[-1]):
        raise bad_value(
            "input",
            "input: the last item is an answer already; end with a message of the user or the results of calls. "
            "To continue an answer, send it to /v1/chat/completions",
        )
    conversation = _find_conversation(request, served.sessions, owner)
    messages = make_messages(request.input)
    given = [one.message for one in messages]
    begins = conversation.session.get("session_turns", 0) == 0
    if begins and request.instructions is not None:
        given = [{"role": "system", "content": request.instructions}, *given]
    try:
        job = parse_chat({**_make_chat(request), "messages": given, **conversation.session}, served, owner)
    except ApiError as error:
        raise rename_error(error, [*[0] * (len(given) - len(messages)), *(one.item for one in messages)]) from error
    shown = {"id": conversation.id, **_show_request(request), "model": served.name}
    shown |= {"temperature": job.params.temperature, "top_p": job.params.top_p}
    constrained_by = "text" if job.constrained_by == "response_format" else job.constrained_by
    beginning = conversation.beginning._replace(tools=job.beginning).name
    return replace(job, constrained_by=constrained_by, beginning=beginning, shown=shown)


def find_response(text: str, sessions: Sessions, owner: str) -> tuple[SessionInfo | None, ResponseId | None]:
    """The session of a response that can be continued; otherwise the newest response of its conversation, if any."""
    found = parse_response_id(text)
    info = None if found is None else sessions.info(SessionId(found.session, owner))
    if found is None or info is None or info.turns < found.turn:
        return None, None
    return (info, None) if info.turns == found.turn else (None, ResponseId(info.name, info.turns))


def _find_conversation(request: ResponseRequest, sessions: Sessions, owner: str) -> _Conversation:
    """The conversation that a request begins or continues, as a session; without `store` it is none."""
    instructions, previous = request.instructions, request.previous_response_id
    asked = "" if instructions is None else digest(instructions)
    if previous is None:
        name = make_session_name(sessions.owns)
        if not request.store:
            return _Conversation(name, Beginning(), {})
        session = {"session_id": name, "session_turns": 0}
        return _Conversation(str(ResponseId(name, 1)), Beginning(instructions=asked), session)
    if not request.store:
        raise bad_value(
            "store",
            "store=false with previous_response_id: a conversation is one state, which every response changes; leave "
            "store out, or send the whole conversation",
        )
    info, newest = find_response(previous, sessions, owner)
    if info is None:
        raise no_previous_error(previous, str(newest) if newest else None)
    beginning = Beginning.parse(info.beginning)
    if instructions is not None and asked != beginning.instructions:
        raise bad_value(
            "instructions",
            "instructions: this conversation began with others, or none, which it has read; send the same or none",
        )
    session = {"session_id": info.name, "session_turns": info.turns}
    return _Conversation(str(ResponseId(info.name, info.turns + 1)), beginning, session)


def _make_chat(request: ResponseRequest) -> dict[str, Any]:
    """The fields of a chat, but its messages and session."""
    chat = {name: getattr(request, name) for name in _SAME if name in request.model_fields_set}
    if request.max_output_tokens is not None:
        chat["max_tokens"] = request.max_output_tokens
    chat["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in request.tools]
    choice: Any = request.tool_choice
    if isinstance(choice, NamedFunction):
        choice = {"type": "function", "function": {"name": choice.name}}
    chat["tool_choice"] = choice
    chat["response_format"] = _make_format(request)
    chat["reasoning_effort"] = request.reasoning.effort
    return chat


def _make_format(request: ResponseRequest) -> dict[str, Any]:
    form = request.text.format
    if isinstance(form, PlainFormat):
        return {"type": form.type}
    return {"type": form.type, "json_schema": form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}


def _show_request(request: ResponseRequest) -> dict[str, Any]:
    """The fields of a response that are those of its request."""
    names = ("instructions", "previous_response_id", "store", "max_output_tokens", "parallel_tool_calls", "metadata")
    choice = request.tool_choice
    return {
        "object": "response",
        "created_at": int(time.time()),
        **{name: getattr(request, name) for name in (*names, "truncation")},
        "tools": [tool.model_dump() for tool in request.tools],
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice,
        "text": {"format": request.text.format.model_dump(by_alias=True, exclude_none=True)},
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "background": False,
    }
