"""One address for several replicas: where requests go, and what becomes of them if a replica is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
from starlette.types import Message, Scope

import msrnn
from msrnn.server import router as front_file
from msrnn.server.affinity import BLOCK
from msrnn.server.in_process import answer_in_process
from msrnn.server.router import Router
from tests.helpers.replicas_here import AT_ONCE, COUNT, Local, body, texts, with_router

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
SCOPE |= {"headers": [(b"host", b"localhost")]}


def test_answers_that_the_end_of_the_front_cuts() -> None:
    """A stream ends with an error, and what has not begun with 503."""

    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        app, content = router.app(), json.dumps(body(stream=True, max_tokens=1900, ignore_eos=True)).encode()
        async with aclosing(answer_in_process(app, {**SCOPE}, content)) as messages:
            while not (await anext(messages)).get("body"):
                pass
            router.pool.up = [False] * COUNT  # the next request waits
            waiting = asyncio.ensure_future(client.post("/v1/completions", json=body()))
            while router.active < 2:
                await asyncio.sleep(0.01)
            router.draining = True
            router.end_answers()
            *_, last = [message async for message in messages]
        assert json.loads(last["body"].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert not last["more_body"]
        refused = await waiting
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")

    with_router(test)


def test_prompts_with_one_prefix_go_to_one_replica() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        system = "x" * BLOCK
        chats = [[{"role": "system", "content": f"{i}{system}"}] for i in range(COUNT)]
        for _ in range(3):
            for chat in chats:
                chat.append({"role": "user", "content": "go on"})
                found = await client.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 2})
                chat.append({"role": "assistant", "content": found.json()["choices"][0]["message"]["content"]})
        prefixes = [replica.engine.prefixes for replica in replicas]
        assert sum(prefix.misses for prefix in prefixes) == COUNT  # the first turn of each chat
        # Without a common beginning, and with too many of one, the loads stay even.
        before = [len(replica.asked) for replica in replicas]
        await texts(client, *(body(f"{system} {i}") for i in range(30)))
        assert min(len(replica.asked) - count for replica, count in zip(replicas, before, strict=True)) >= 4

    with_router(test)


def test_what_the_front_says_itself(tmp_path: Path) -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        keyed = {"Authorization": "Bearer secret"}
        assert (await client.post("/v1/completions", json=body())).status_code == 401
        found = await client.post("/v1/completions", json=body(session_id="talk"), headers=keyed)
        assert found.status_code == 400
        assert "--sessions FOLDER" in found.text
        assert (await client.get("/v1/sessions", headers=keyed)).json()["data"] == []
        lone = await client.post("/v1/completions", content=b'{"prompt": "a", "session_id": "\\ud800"}', headers=keyed)
        assert lone.status_code == 400
        for wrong in (b"{", b"[]", b'{"prompt": 3}', b'{"prompt": [[]], "session_id": 4}'):
            assert (await client.post("/v1/completions", content=wrong, headers=keyed)).status_code == 400
        assert (await client.post("/v1/completions", content=b" " * 2000, headers=keyed)).status_code == 413
        assert (await client.get("/v1/nothing", headers=keyed)).json()["error"]["code"] == "not_found"
        assert (await client.get("/nothing")).json()["error"]["code"] == "not_found"
        assert (await client.get("/v1/models", headers=keyed)).json()["data"][0]["id"] == "tiny"
        assert "<title>" in (await client.get("/")).text
        assert (await client.get("/version")).json() == {"version": msrnn.__version__}
        assert (await client.get("/health")).json() == {"status": "ok", "replicas": COUNT, "replicas_up": COUNT}
        for _ in range(2 * COUNT):
            assert (await client.post("/v1/completions", json=body(), headers=keyed)).status_code == 200
        lines = (await client.get("/metrics")).text.splitlines()
        counts = [float(line.split()[1]) for line in lines if line.startswith("msrnn_generation_tokens_total{")]
        assert (len(counts), sum(counts)) == (COUNT, 8 * COUNT)
        router.draining = True
        assert (await client.post("/v1/completions", json=body(), headers=keyed)).status_code == 503
        assert (await client.get("/health")).status_code == 503

    with_router(test, keys=["secret"], body_bytes=1000)


def test_a_client_that_leaves() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        asked: list[Message] = [{"type": "http.request", "body": json.dumps(body(max_tokens=1900)).encode()}]
        left = asyncio.Event()

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise AssertionError(f"{message} for nobody")

        scope = {**SCOPE}
        app = asyncio.ensure_future(router.app()(scope, receive, send))
        while not any(replica.engine.counts.running for replica in replicas):
            await asyncio.sleep(0.01)
        left.set()
        await app
        async with asyncio.timeout(60):
            while any(replica.engine.counts.running for replica in replicas):
                await asyncio.sleep(0.01)

    with_router(test)


def test_a_replica_that_hangs_or_is_lost_while_metrics_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_file, "METRICS_TIMEOUT", 2.0)

    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        asked = asyncio.Event()

        async def hanging(scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
            if scope["method"] == "POST":
                asked.set()
            await asyncio.sleep(600)
            yield {}

        replicas[0].dies_before = AT_ONCE
        monkeypatch.setattr(replicas[1], "answer", hanging)
        text = (await client.get("/metrics")).text
        assert 'replica="2"' in text
        assert 'replica="1"' not in text
        # A prompt that waits for such a replica goes elsewhere when the replica is found to be down.
        router.pool.mark(0, up=False)
        router.pool.mark(2, up=False)
        waiting = asyncio.ensure_future(texts(client, body()))
        await asked.wait()
        router.pool.mark(2, up=True)
        router.pool.mark(1, up=False)
        await waiting

    with_router(test)
