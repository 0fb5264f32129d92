"""A client that does not read its stream loses it, and not the server its memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

import msrnn
from msrnn.hf.loading import Loaded
from msrnn.server.limits import Limits
from msrnn.server.router import Router
from msrnn.server.server import Server
from tests.helpers.live_server import served_by
from tests.helpers.replicas_here import COUNT, Local

BODY = json.dumps({"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
HEADERS = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
SCOPE = {
    **{"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": HEADERS},
    **{"http_version": "1.1", "root_path": "", "scheme": "http", "server": ("127.0.0.1", 80)},
}


async def ask_without_reading(app: ASGIApp, ended: Callable[[], bool]) -> list[bytes]:
    """What is sent when the client reads at last, after the request has ended."""
    arrived: list[Any] = [{"type": "http.request", "body": BODY, "more_body": False}]
    reads, sent = asyncio.Event(), list[bytes]()

    async def receive() -> Any:
        if not arrived:
            await asyncio.Event().wait()
        return arrived.pop()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            await reads.wait()  # as the transport does while its buffers are full

    stream = asyncio.ensure_future(app({**SCOPE}, receive, send))
    while not (sent and ended()):
        await asyncio.sleep(0.01)
    reads.set()
    await stream
    return sent


def check(sent: list[bytes]) -> None:
    assert len(sent) < 40
    assert b"client_too_slow" in b"".join(sent[-2:])


def test_a_stream_that_nobody_reads_is_cancelled(rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    engine = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer)
    server = Server(engine, served_by(engine), Limits(behind=20))
    asking = ask_without_reading(server.app(), lambda: server.active == 0 and engine.counts.running == 0)
    check(asyncio.run(asyncio.wait_for(asking, 60)))
    engine.close()


def test_behind_several_replicas() -> None:
    async def run() -> list[bytes]:
        replicas = [Local(number, None) for number in range(COUNT)]
        router = Router(replicas, Limits(behind=20), sessions=False)
        sent = await ask_without_reading(router.app(), lambda: not any(one.engine.counts.running for one in replicas))
        for replica in replicas:
            assert replica.engine.counts.running == 0
            replica.engine.close()
        return sent

    check(asyncio.run(asyncio.wait_for(run(), 60)))
