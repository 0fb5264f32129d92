"""One line for each request: what it tells, and what it must not tell."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.server.in_process import answer_in_process
from msrnn.server.limits import Limits
from msrnn.server.protocol import Served
from msrnn.server.request_log import RequestLog
from msrnn.server.router import Router
from msrnn.server.server import Server
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.replicas_here import Local, body, with_router

TIMES = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d |, \d+ ms$")
KEY, SECRET = "sk-very-secret", "a secret word"


def of(lines: list[str]) -> list[str]:
    """The lines without their times, which each must have."""
    assert all(len(TIMES.findall(line)) == 2 for line in lines), lines
    return [TIMES.sub("", line) for line in lines]


@pytest.fixture(scope="module")
def server() -> Server:
    tokenizer = character_tokenizer()
    engine = msrnn.Engine(msrnn.MultiStateRNN(character_model(), "tova", 16), 2, tokenizer=tokenizer)
    return Server(engine, Served("tiny", tokenizer, 16, 2000, engine.sessions), Limits(keys=[KEY]))


def lines_of(server: Server, *requests: tuple[str, str, Any], key: str = KEY) -> list[str]:
    lines: list[str] = []

    async def ask() -> None:
        transport = httpx.ASGITransport(RequestLog(server.app(), lines.append))
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            for method, path, content in requests:
                await client.request(method, path, json=content)

    asyncio.run(ask())
    assert not any(word in "".join(lines) for word in (KEY, SECRET, "secret"))
    return of(lines)


def test_answers(server: Server) -> None:
    asked = body(SECRET, ignore_eos=True)
    requests = [("POST", "/v1/completions", {**asked, **more}) for more in ({}, {"stream": True}, {"n": 2}, {"n": "x"})]
    tokens = len(server.served.tokenizer(SECRET)["input_ids"])
    assert lines_of(server, *requests) == [
        f"POST /v1/completions 200, {tokens} prompt + 4 completion tokens",
        f"POST /v1/completions 200, {tokens} prompt + 4 completion tokens",
        f"POST /v1/completions 200, {tokens} prompt + 8 completion tokens",
        "POST /v1/completions 400",
    ]


def test_names_and_odd_paths(server: Server) -> None:
    """Names of sessions are the clients' own; a path cannot write lines of its own, and has no query."""
    paths = ["secret", "secret/memory", "secret/fork", "secret/other", "secret%2Fsecret", "secret/secret/memory"]
    name = "/v1/sessions/{name}"
    assert lines_of(server, *(("GET", f"/v1/sessions/{path}", None) for path in paths)) == [
        f"GET {name} 404",
        f"GET {name}/memory 404",
        f"GET {name}/fork 405",
        *[f"GET {name} 404"] * 2,
        f"GET {name}/memory 404",
    ]
    responses = (("DELETE", "/v1/responses/secret", None), ("POST", "/v1/responses/secret/cancel", None))
    assert lines_of(server, *responses) == [f"{method} /v1/responses/{{response}} 404" for method in ("DELETE", "POST")]
    odd = ["/v1/models?key=secret", "/%0A%1b[31m%0d200%E2%80%A8%C3%BC", "/" + "a" * 5000, "/wrong/chat"]
    assert lines_of(server, *(("GET", path, None) for path in odd)) == [
        "GET /v1/models 200",
        "GET /%0A%1B%5B31m%0D200%E2%80%A8%C3%BC 404",
        f"GET /{'a' * 99} 404",
        "GET /wrong/chat 404",
    ]


def test_polling_is_logged_only_if_it_fails(server: Server) -> None:
    polled = [("GET", path, None) for path in ("/health", "/metrics", "/version")]
    assert lines_of(server, *polled) == ["GET /version 200"]
    server.draining = True
    assert lines_of(server, *polled) == ["GET /health 503", "GET /version 200"]
    server.draining = False


def test_refusals(server: Server) -> None:
    assert lines_of(server, ("POST", "/v1/completions", body()), key="secret") == ["POST /v1/completions 401"]


def test_a_client_that_leaves(server: Server) -> None:
    lines: list[str] = []

    async def leave() -> None:
        headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        content = b'{"prompt": "hello", "max_tokens": 1900, "ignore_eos": true, "stream": true}'
        async for message in answer_in_process(RequestLog(server.app(), lines.append), scope, content):
            if message.get("body"):
                break
        while not lines:
            await asyncio.sleep(0.01)

    asyncio.run(leave())
    (line,) = of(lines)
    count = re.fullmatch(r"POST /v1/completions 200, 6 prompt \+ (\d+) completion tokens", line)
    assert count is not None
    assert 0 < int(count[1]) < 1900


def test_a_log_that_cannot_be_written(server: Server) -> None:
    def fail(_: str) -> None:
        raise BrokenPipeError

    async def ask() -> int:
        transport = httpx.ASGITransport(RequestLog(server.app(), fail))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/version")).status_code

    assert asyncio.run(ask()) == 200


def test_requests_through_replicas_are_logged_once(tmp_path: Path) -> None:
    """Also if a replica is lost and another one answers, or the router asks a replica for more."""
    lines: list[str] = []

    async def test(router: Router, replicas: list[Local], _: httpx.AsyncClient) -> None:
        transport = httpx.ASGITransport(RequestLog(router.app(), lines.append))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            replicas[0].dies_before = 0
            for more in ({}, {"stream": True}, {"session_id": "talk"}):
                replicas[0].dies_before = None if more else 0
                router.pool.mark(0, up=True)
                await client.post("/v1/completions", json=body("hello", ignore_eos=True, **more))
            await client.get("/v1/sessions")

    with_router(test, tmp_path)
    assert of(lines) == [*["POST /v1/completions 200, 6 prompt + 4 completion tokens"] * 3, "GET /v1/sessions 200"]
