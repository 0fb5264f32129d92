"""The events of the requests of one HTTP request, and the reply that is streamed from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from msrnn.engine.requests import Event, Request
from msrnn.server.asgi import wait_for_disconnect
from msrnn.server.errors import (
    ApiError,
    internal_error,
    session_error,
)
from msrnn.server.replies import Reply


@dataclass(frozen=True, eq=False)
class Feed:
    """The events of a job's requests in order of arrival; None ends those of one request."""

    requests: list[Request]
    events: asyncio.Queue[Event | Exception | None]
    tasks: list[asyncio.Task[None]]

    async def read(self) -> AsyncGenerator[Event, None]:
        """Yield all events. Closing the generator early cancels the requests."""
        try:
            unfinished = len(self.tasks)
            while unfinished:
                event = await self.events.get()
                if isinstance(event, ApiError):
                    raise event
                if isinstance(event, Exception):
                    raise internal_error(f"internal error ({type(event).__name__})") from event
                if event is None:
                    unfinished -= 1
                    continue
                if event.finish_reason == "error":
                    raise _make_answer_error(event)
                yield event
        finally:
            self.cancel()
            for task in self.tasks:
                task.cancel()

    def cancel(self) -> None:
        for request in self.requests:
            request.cancel()


async def read_all(feed: Feed) -> None:
    async with aclosing(feed.read()) as events:
        async for _ in events:
            pass


async def stream_reply(http: HttpRequest, feed: Feed, reply: Reply) -> AsyncIterator[bytes]:
    gone = asyncio.ensure_future(wait_for_disconnect(http.receive))  # also noticed while there is nothing to send yet
    gone.add_done_callback(lambda _: feed.cancel())  # the engine then ends the events, and so this stream
    first = reply.first_chunks()  # sent with the first event: until then, another server can still take over
    try:
        async with aclosing(feed.read()) as events:
            async for event in events:
                echoes = reply.echoes_now(event)  # a prompt that is sent back may be long
                new = await asyncio.to_thread(reply.chunks, event) if echoes else reply.chunks(event)
                for chunk in [*first, *new]:
                    yield chunk
                first = []
        for chunk in [*first, *reply.last_chunks()]:
            yield chunk
    except ApiError as error:
        yield reply.format_error(error)
    finally:
        gone.cancel()


def _make_answer_error(event: Event) -> ApiError:
    answer = event.request.answers[event.number]
    message = answer.error or "the answer failed"
    return internal_error(message) if answer.error_code is None else session_error(message, answer.error_code)
