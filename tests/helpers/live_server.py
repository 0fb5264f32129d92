"""A server on a real socket, for tests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
import uvicorn

import msrnn
from msrnn.engine.executor import SampledTokens, Sampler
from msrnn.server.http_server import DrainingServer, bind, listen
from msrnn.server.limits import Limits
from msrnn.server.protocol import Served
from msrnn.server.server import Server

KEY = "sk-test"


@dataclass
class Live:
    """A server in a thread of this process."""

    server: Server
    http: DrainingServer
    address: str
    loop: asyncio.AbstractEventLoop | None = None

    def tasks(self) -> int:
        """Tasks of its asyncio loop."""
        assert self.loop is not None
        return len(asyncio.all_tasks(self.loop))


def served_by(engine: msrnn.Engine, **offered: Any) -> Served:
    """What a server with this engine offers."""
    return Served("tiny", engine.tokenizer, 16, 2000, engine.sessions, **offered)


@contextmanager
def live(engine: msrnn.Engine, limits: Limits | None = None, port: int = 0, **offered: Any) -> Iterator[Live]:
    """A server that answers with this engine; at a free port, unless one is given."""
    server = Server(engine, served_by(engine, **offered), limits or Limits(keys=[KEY]))
    config = uvicorn.Config(server.app(), log_level="error", timeout_graceful_shutdown=2)
    listener, http = bind("127.0.0.1", port), DrainingServer(config, server, 30)
    listen(listener, "127.0.0.1")
    found = Live(server, http, f"http://127.0.0.1:{listener.getsockname()[1]}")

    async def serve() -> None:
        found.loop = asyncio.get_running_loop()
        await http.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not http.started:
        time.sleep(0.01)
    try:
        yield found
    finally:
        http.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def running(engine: msrnn.Engine, limits: Limits | None = None, port: int = 0) -> Iterator[str]:
    """The address of a server that answers with this engine."""
    with live(engine, limits, port) as found:
        yield found.address


def post(address: str, body: Any, path: str = "/v1/completions", key: str = KEY) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return httpx.post(address + path, content=content, headers=headers, timeout=30)


def greedy(rnn: msrnn.MultiStateRNN, ids: list[int], count: int) -> list[int]:
    out = rnn.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def wait_until(true: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def slow_down(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> threading.Event:
    """Delay every decode step by this many seconds, until the event is set."""
    step, fast = engine.executor.step, threading.Event()

    def slowed(samplers: Sequence[Sampler]) -> SampledTokens:
        fast.wait(seconds)
        return step(samplers)

    monkeypatch.setattr(engine.executor, "step", slowed)
    return fast
