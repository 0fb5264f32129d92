"""A bounded backlog of messages between a replica and a slow client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Message

from msrnn.server.errors import slow_client_error


async def with_backlog(messages: AsyncGenerator[Message, None], most: int) -> AsyncGenerator[Message, None]:
    """Yield the same messages, and read the source ahead of the client: an error if `most` messages wait."""
    waiting: asyncio.Queue[Message | BaseException | None] = asyncio.Queue()

    async def take() -> None:
        try:
            async with aclosing(messages):
                async for message in messages:
                    if waiting.qsize() >= most:
                        raise slow_client_error(most)
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
