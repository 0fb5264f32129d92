"""A feed: events of several requests in order of arrival, errors in OpenAI's shape, and the end."""

from __future__ import annotations

import asyncio

import pytest

from msrnn.engine.requests import Event, Request, SamplingParams
from msrnn.server.errors import ApiError, shutting_down_error
from msrnn.server.feed import Feed


def read_feed(requests: list[Request], *events: Event | Exception | None) -> list[Event]:
    """What a feed yields. At its end, its requests and tasks are cancelled."""

    async def read() -> list[Event]:
        feed = Feed(requests, asyncio.Queue(), [asyncio.ensure_future(asyncio.sleep(60)) for _ in requests])
        for event in events:
            feed.events.put_nowait(event)
        try:
            return [event async for event in feed.read()]
        finally:
            await asyncio.gather(*feed.tasks, return_exceptions=True)
            assert all(task.cancelled() for task in feed.tasks)

    try:
        return asyncio.run(read())
    finally:
        assert all(request.cancelled for request in requests)


def make_requests() -> list[Request]:
    return [Request([1, 2], SamplingParams()) for _ in range(2)]


def token(request: Request) -> Event:
    return Event(request, 0, 7, "seven", None, None)


def test_events_in_order_of_arrival_until_all_requests_end() -> None:
    one, two = make_requests()
    events = [token(one), token(two), token(one)]
    assert read_feed([one, two], events[0], events[1], None, events[2], None) == events


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [(None, 500, "the device is lost"), ("session_busy", 409, "the device is lost")],
)
def test_an_answer_that_failed(code: str | None, status: int, message: str) -> None:
    requests = make_requests()
    with pytest.raises(ApiError, match=message) as raised:
        read_feed(requests, token(requests[0]), *requests[1].fail(message, code))
    assert raised.value.status == status


def test_errors_of_the_server_and_the_text_of_others_is_not_shown() -> None:
    with pytest.raises(ApiError, match="shutting down"):
        read_feed(make_requests(), shutting_down_error())
    with pytest.raises(ApiError) as raised:
        read_feed(make_requests(), ValueError("a prompt"))
    assert (raised.value.status, "a prompt" in str(raised.value.body)) == (500, False)
    assert "ValueError" in str(raised.value.body)
