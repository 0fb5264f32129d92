from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from starlette.types import Message

from msrnn.server.backlog import with_backlog
from msrnn.server.errors import ApiError


class Source:
    """Messages, and whether their reader has gone."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error, self.sent, self.closed = count, error, 0, False

    async def messages(self) -> AsyncGenerator[Message, None]:
        try:
            for number in range(self.count):
                self.sent += 1
                yield {"type": str(number)}
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def test_the_same_messages_in_order() -> None:
    async def read() -> list[str]:
        return [message["type"] async for message in with_backlog(Source(20).messages(), 100)]

    assert asyncio.run(read()) == [*map(str, range(20))]


def test_a_client_that_is_too_slow() -> None:
    source = Source(100)

    async def read() -> list[str]:
        found = []
        async for message in with_backlog(source.messages(), 4):
            found.append(message["type"])
            await asyncio.sleep(0.02)
        return found

    with pytest.raises(ApiError) as error:
        asyncio.run(read())
    assert (error.value.status, error.value.code) == (408, "client_too_slow")
    assert source.sent < 10
    assert source.closed


def test_an_error_of_the_source_comes_after_its_messages() -> None:
    async def read() -> None:
        messages = with_backlog(Source(2, ValueError("broken")).messages(), 9)
        assert [(await anext(messages))["type"] for _ in range(2)] == ["0", "1"]
        with pytest.raises(ValueError, match="broken"):
            await anext(messages)

    asyncio.run(read())


def test_a_client_that_leaves_closes_the_source() -> None:
    source = Source(10**9)

    async def read() -> None:
        async with aclosing(with_backlog(source.messages(), 10**9)) as messages:
            await anext(messages)
        assert source.closed

    asyncio.run(read())
