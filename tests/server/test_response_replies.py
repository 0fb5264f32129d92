from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import msrnn
from msrnn.server.errors import session_error
from msrnn.server.protocol import parse_chat
from msrnn.server.response_replies import ResponseReply
from tests.helpers.live_server import served_by
from tests.helpers.responses import make_engine, user


@pytest.fixture(scope="module")
def engine() -> Any:
    found = make_engine()
    yield found
    found.close()


def make_reply(engine: msrnn.Engine, text: str, reason: Any) -> ResponseReply:
    job = parse_chat({"messages": [user("a")]}, served_by(engine))
    request = engine.request(job.prompts[0])
    request.answers[0].text, request.answers[0].finish_reason = text, reason
    shown = {"id": "resp_1", "model": "tiny"}
    return ResponseReply(replace(job, shown=shown), [request], "tiny", engine.tokenizer)


def read_events(chunks: list[bytes]) -> list[Any]:
    events = []
    for chunk in chunks:
        name, data = chunk.decode().removesuffix("\n\n").split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("cancelled", "cancelled", None),
    ],
)
def test_how_an_answer_has_ended(engine: msrnn.Engine, reason: str, status: str, details: Any) -> None:
    found = make_reply(engine, "so", reason).complete()
    assert (found["status"], found["incomplete_details"], found["error"]) == (status, details, None)
    assert found["output"][0]["content"][0]["text"] == "so"
    (last,) = read_events(make_reply(engine, "so", reason).last_chunks())
    assert last["type"] == ("response.completed" if reason == "stop" else "response.incomplete")
    assert last["response"]["status"] == status


def test_the_first_events_know_no_answer(engine: msrnn.Engine) -> None:
    reply = make_reply(engine, "", None)
    events = read_events(reply.first_chunks())
    assert [event["sequence_number"] for event in events] == [0, 1]
    assert {event["response"]["status"] for event in events} == {"in_progress"}
    assert [event["response"]["output"] for event in events] == [[], []]
    assert {event["response"]["usage"] for event in events} == {None}


def test_tokens(engine: msrnn.Engine) -> None:
    reply = make_reply(engine, "so", "stop")
    usage, counted = reply.complete()["usage"], reply.usage()
    assert usage["input_tokens"] == counted["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_an_error_is_where_clients_look_for_it(engine: msrnn.Engine) -> None:
    (event,) = read_events([make_reply(engine, "", None).format_error(session_error("is in use", "session_in_use"))])
    assert (event["type"], event["code"], event["param"]) == ("error", "session_in_use", "previous_response_id")
    assert event["error"]["message"] == event["message"] == "is in use"
