"""Messages on their way to a client that may not read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Message

from msrnn.server.errors import too_slow


async def with_backlog(messages: AsyncGenerator[Message, None], most: int) -> AsyncGenerator[Message, None]:
    """The same messages, taken from their source at once; an error if `most` of them wait for the client."""
    waiting: asyncio.Queue[Message | BaseException | None] = asyncio.Queue()

    async def take() -> None:
        try:
            async with aclosing(messages):
                async for message in messages:
                    if waiting.qsize() >= most:
                        raise too_slow(most)
                    waiting.put_nowait(message)
            waiting.put_nowait(None)
        except BaseException as error:
            waiting.put_nowait(error)

    taking = asyncio.ensure_future(take())
    try:
        while (message := await waiting.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            yield message
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
