"""A server on a real socket, for tests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
import uvicorn

import msrnn
from msrnn.serve.app import Limits, Server
from msrnn.serve.protocol import Served

KEY = "sk-test"


@contextmanager
def running(engine: msrnn.Engine, limits: Limits | None = None) -> Iterator[str]:
    """The address of a server that answers with this engine."""

    served = Served("tiny", engine.tokenizer, 16, 2000, engine.sessions)
    app = Server(engine, served, limits or Limits(keys=[KEY])).app()
    config = uvicorn.Config(app, "127.0.0.1", 0, log_level="error", timeout_graceful_shutdown=2)
    listener, server = config.bind_socket(), uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def post(address: str, body: Any, path: str = "/v1/completions", key: str = KEY) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return httpx.post(address + path, content=content, headers=headers, timeout=30)


def slow_down(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every decode step take 20 ms more."""
    step = engine.rows.step

    def slowed(count: int) -> torch.Tensor:
        time.sleep(0.02)
        return step(count)

    monkeypatch.setattr(engine.rows, "step", slowed)
