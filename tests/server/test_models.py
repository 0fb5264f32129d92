from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from msrnn.engine.engine import Engine
from msrnn.server.limits import Limits
from msrnn.server.router import Router
from msrnn.server.server import Server
from tests.helpers.characters import character_tokenizer
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.live_server import served_by
from tests.helpers.replicas_here import Local, with_router


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(FakeExecutor(size=16), tokenizer=character_tokenizer())


def get(engine: Engine, path: str, name: str = "tiny") -> httpx.Response:
    served = replace(served_by(engine), name=name)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Server(engine, served, Limits()).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_the_model_by_its_name(engine: Engine) -> None:
    (listed,) = get(engine, "/v1/models").json()["data"]
    found = get(engine, "/v1/models/tiny")
    assert (found.status_code, found.json()) == (200, listed)
    assert (listed["id"], listed["object"], listed["max_model_len"]) == ("tiny", "model", 2000)


@pytest.mark.parametrize("name", ["other", "tiny/", "Tiny", "", "a/b", "tin%79y"])
def test_another_name_is_answered_with_the_name_that_is_served(engine: Engine, name: str) -> None:
    found = get(engine, f"/v1/models/{name}")
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "is not served here: the model is 'tiny'" in error["message"]


@pytest.mark.parametrize("path", ["/v1/models/an-org/a-model", "/v1/models/an-org%2Fa-model"])
def test_a_name_may_have_slashes(engine: Engine, path: str) -> None:
    assert get(engine, path, "an-org/a-model").json()["id"] == "an-org/a-model"
    assert get(engine, "/v1/models/an-org", "an-org/a-model").status_code == 404


def test_the_length_is_that_of_the_model_where_its_positions_end_before(engine: Engine) -> None:
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    try:
        for longest in (1, 2, 777, 1999, 2000, 5000):
            executor.longest = longest
            assert get(engine, "/v1/models/tiny").json()["max_model_len"] == min(longest, 2000)
    finally:
        executor.longest = 2**31


def test_a_router_knows_the_model_of_its_replicas() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 2000
        assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
        assert (await client.post("/v1/embeddings", json={"input": "a"})).json()["error"]["code"] == (
            "unsupported_endpoint"
        )
        for path in ("/v1/nothing", "/nothing"):
            assert "POST /v1/chat/completions" in (await client.get(path)).json()["error"]["message"]

    with_router(test)
