from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from msrnn.server.in_process import answer_in_process
from msrnn.server.request_log import USAGE

SCOPE: dict[str, Any] = {"type": "http", "path": "/v1/completions"}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the path and the body back, and counts what it has sent."""
    asked, sent = await receive(), list[str]()
    scope[USAGE].append(lambda: {"sent": len(sent)})
    for text in (scope["path"], asked["body"].decode()):
        sent.append(text)
        await send({"type": "http.response.body", "body": text})


def test_messages_come_with_the_usage_so_far() -> None:
    async def read() -> list[Message]:
        return [message async for message in answer_in_process(echo, SCOPE, b"hello")]

    found = asyncio.run(read())
    assert [message["body"] for message in found] == ["/v1/completions", "hello"]
    assert [message[USAGE] for message in found] == [{"sent": 1}, {"sent": 2}]
    assert USAGE not in SCOPE


def test_an_error_of_the_application_is_raised() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start"})
        raise ValueError("broken")

    async def read() -> None:
        messages = answer_in_process(fail, SCOPE, b"")
        assert await anext(messages) == {"type": "http.response.start"}
        with pytest.raises(ValueError, match="broken"):
            await anext(messages)

    asyncio.run(read())


def test_closing_early_is_a_disconnect() -> None:
    seen: list[str] = []

    async def run() -> None:
        ended = asyncio.Event()

        async def wait(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append((await receive())["type"])
            await send({"type": "http.response.start"})
            seen.append((await receive())["type"])
            ended.set()

        async with aclosing(answer_in_process(wait, SCOPE, b"")) as messages:
            await anext(messages)
            assert seen == ["http.request"]
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(run())
    assert seen == ["http.request", "http.disconnect"]
