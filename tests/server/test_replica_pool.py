"""Replicas that are lost: before they answer, in the middle of a stream, and found again."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from msrnn.server.router import Router
from tests.helpers.replicas_here import AT_ONCE, Local, body, texts, with_router

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
SCOPE |= {"headers": [(b"host", b"localhost")]}


def test_a_replica_that_is_lost_before_it_answers() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        expected = await texts(client, body())
        for before in (AT_ONCE, 0, 1):
            router.pool.mark(0, up=True)
            replicas[0].dies_before = before
            streams = [body(stream=True) for _ in range(6)]
            assert {*await texts(client, *(body() for _ in range(6)))} == {*expected}
            assert router.pool.up == [False, True, True]
            router.pool.mark(0, up=True)
            for found in await asyncio.gather(*(client.post("/v1/completions", json=one) for one in streams)):
                assert found.text.endswith("data: [DONE]\n\n")
                assert "error" not in found.text

    with_router(test)


def test_a_replica_that_is_lost_in_the_middle_of_a_stream() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        for replica in replicas:
            replica.dies_before = 3
        found = await client.post("/v1/completions", json=body(stream=True))
        *chunks, last = [line for line in found.text.split("\n\n") if line]
        assert len(chunks) == 2
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert router.pool.up.count(False) == 1

    with_router(test)


def test_a_request_that_no_replica_survives() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        for replica in replicas:
            replica.dies_before = 0
        found = await client.post("/v1/completions", json=body())
        assert found.status_code == 500
        assert found.json()["error"]["message"] == "3 replicas ended while they answered this request"
        health = await client.get("/health")
        assert (health.status_code, health.json()["replicas_up"]) == (503, 0)

    with_router(test)


def test_replicas_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.server.replica_pool.PING_SECONDS", 0.01)

    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        app = router.app()
        async with app.router.lifespan_context(app):
            for how in (AT_ONCE, 0):
                replicas[1].dies_before = how
                while router.pool.up != [True, False, True]:
                    await asyncio.sleep(0.01)
                replicas[1].dies_before = None
                while not all(router.pool.up):
                    await asyncio.sleep(0.01)

    with_router(test)
