"""Call an ASGI application in its own process, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from msrnn.server.request_log import USAGE


async def answer_in_process(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
    """Yield the messages of the answer, with its usage so far. Closing the generator early is a disconnect."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    counted: list[Callable[[], dict[str, Any]]] = []
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await sent.put({**message, USAGE: counted[-1]()} if counted else message)

    async def run() -> None:
        try:
            await app({**scope, USAGE: counted}, receive, send)
        finally:
            sent.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        while (message := await sent.get()) is not None:
            yield message
        await running
    finally:
        left.set()
