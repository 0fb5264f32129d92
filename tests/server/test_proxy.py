"""The router's part of one request, with replicas that send given messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.types import Message, Scope

from msrnn.server.limits import Limits
from msrnn.server.proxy import Proxy
from msrnn.server.replica_pool import LostReplicaError
from msrnn.server.router import Router

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
SCOPE: dict[str, Any] = {
    **{"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": ""},
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
}


def part(text: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Replica:
    """Sends these messages; an exception among them is raised, and None waits for ever."""

    def __init__(self, *messages: Message | Exception | None) -> None:
        self.messages, self.bodies, self.closed = messages, list[bytes](), False

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        self.bodies.append(body)
        try:
            for message in self.messages:
                if message is None:
                    await asyncio.Event().wait()
                elif isinstance(message, Exception):
                    raise message
                else:
                    yield message
        finally:
            self.closed = True

    async def ping(self) -> None:
        pass


Then = Callable[[Router, asyncio.Event], Awaitable[None]]


def ask(replica: Replica, then: Then | None = None, body: bytes = b'{"prompt": "a"}', **limits: Any) -> list[Message]:
    """The messages that a client gets. `then` runs when the first has come, and may set that the client has left."""
    sent: list[Message] = []

    async def run() -> None:
        router, left, begun = Router([replica], Limits(**limits), sessions=False), asyncio.Event(), asyncio.Event()
        asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            begun.set()

        answering = asyncio.ensure_future(Proxy(router)(SCOPE, receive, send))
        if then is not None:
            await asyncio.wait_for(begun.wait(), 60)
            await then(router, left)
        await asyncio.wait_for(answering, 60)
        assert (router.active, router.pool.loads) == (0, [0])

    asyncio.run(run())
    return sent


def error_in(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(message["body"].removeprefix(b"data: "))["error"]
    return found


def test_an_answer_is_sent_as_it_comes() -> None:
    replica = Replica(START, part(b"a"), part(b"b", more=False))
    assert ask(replica) == [START, part(b"a"), part(b"b", more=False)]
    assert replica.bodies == [b'{"prompt": "a"}']


def test_a_body_that_is_too_large_reaches_no_replica() -> None:
    replica = Replica()
    start, end = ask(replica, body_bytes=3)
    assert (start["status"], error_in(end)["code"]) == (413, "body_too_large")
    assert replica.bodies == []


def test_an_error_before_the_answer_does_not_show_its_text() -> None:
    start, end = ask(Replica(ValueError("with a prompt in it")))
    assert start["status"] == 500
    assert error_in(end)["message"] == "internal error (ValueError)"


def test_a_replica_that_is_lost_while_it_answers() -> None:
    *_, last = ask(Replica(START, part(b"a"), LostReplicaError()))
    assert error_in(last)["message"] == "the replica that answered has ended: ask again"
    assert not last["more_body"]


def test_a_client_that_leaves_ends_the_answer() -> None:
    replica = Replica(START, part(b"a"), None)

    async def leave(_: Router, left: asyncio.Event) -> None:
        left.set()

    ask(replica, leave)
    assert replica.closed


def test_a_router_that_stops_ends_streams_with_an_error() -> None:
    async def end(router: Router, _: asyncio.Event) -> None:
        router.end_answers()

    *_, last = ask(Replica(START, part(b"a"), None), end)
    assert (error_in(last)["code"], last["more_body"]) == ("shutting_down", False)


def test_a_router_that_drains_refuses() -> None:
    async def run() -> list[Message]:
        router, sent = Router([Replica()], Limits(), sessions=False), list[Message]()
        router.draining = True

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        await Proxy(router)(SCOPE, receive, send)
        return sent

    start, end = asyncio.run(run())
    assert (start["status"], error_in(end)["code"]) == (503, "shutting_down")
