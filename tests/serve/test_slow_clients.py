"""A client that does not read its stream loses it, and not the server its memory."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from live_server import served_by

import msrnn
from msrnn.hf.loading import Loaded
from msrnn.serve.app import Server
from msrnn.serve.limits import Limits


def test_a_stream_that_nobody_reads_is_cancelled(rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    engine = msrnn.Engine(rnn, rows=2, tokenizer=small.tokenizer)
    server = Server(engine, served_by(engine), Limits(behind=20))
    body = json.dumps({"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
    arrived = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[bytes] = []

    async def run() -> None:
        reads = asyncio.Event()

        async def receive() -> Any:
            if not arrived:
                await asyncio.Event().wait()
            return arrived.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.append(message["body"])
                await reads.wait()  # as the transport does while its buffers are full

        about = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "http_version": "1.1",
        }
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope: Any = {**about, "headers": headers, "scheme": "http", "server": ("127.0.0.1", 80)}
        stream = asyncio.ensure_future(server.app()(scope, receive, send))
        while server.active or not sent:  # the request ends although the client has not read
            await asyncio.sleep(0.01)
        assert engine.counts["rows"] <= 1  # given back at the next step
        reads.set()
        await stream

    asyncio.run(asyncio.wait_for(run(), 60))
    engine.close()
    assert len(sent) < 40
    assert b"client_too_slow" in sent[-2]
