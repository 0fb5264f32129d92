"""Replicas of a server in this process, behind a router; test_ray_replicas.py has them in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
from starlette.types import Message, Scope

import msrnn
from msrnn.server.affinity import assign_replica
from msrnn.server.in_process import answer_in_process
from msrnn.server.limits import Limits
from msrnn.server.protocol import Served
from msrnn.server.replica_pool import LostReplicaError
from msrnn.server.router import Router
from msrnn.server.server import Server
from tests.helpers.characters import character_model, character_tokenizer

COUNT, AT_ONCE = 3, -1


class Local:
    """A replica whose process may end: before it works, or before it sends a message of an answer, by its number."""

    def __init__(self, number: int, folder: Path | None) -> None:
        self.number, self.folder = number, folder
        self.dies_before: int | None = None
        self.asked: list[str] = []
        self.start()

    def start(self) -> None:
        def owns(name: str) -> bool:
            return assign_replica(name, COUNT) == self.number

        rnn, tokenizer = msrnn.MultiStateRNN(character_model(), "tova", 16), character_tokenizer()
        self.engine = msrnn.Engine(rnn, 4, tokenizer=tokenizer, sessions=self.folder, owns_session=owns)
        served = Served("tiny", tokenizer, 16, 2000, self.engine.sessions)
        self.app = Server(self.engine, served, Limits(origins=None)).app()

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        self.asked.append(scope["path"])
        if self.dies_before == AT_ONCE:
            raise LostReplicaError
        found = 0
        async with aclosing(answer_in_process(self.app, scope, body)) as messages:
            async for message in messages:
                if found == self.dies_before and scope["method"] == "POST":
                    raise LostReplicaError
                yield message
                found += 1

    async def ping(self) -> None:
        if self.dies_before is not None:
            raise LostReplicaError if self.dies_before == AT_ONCE else RuntimeError("anything else")


Test = Callable[[Router, list[Local], httpx.AsyncClient], Coroutine[Any, Any, None]]


def with_router(test: Test, folder: Path | None = None, **limits: Any) -> None:
    async def run() -> None:
        replicas = [Local(number, folder) for number in range(COUNT)]
        router = Router(replicas, Limits(**limits), sessions=folder is not None)
        transport = httpx.ASGITransport(router.app(), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            await test(router, replicas, client)
        assert (router.active, router.pool.loads) == (0, [0] * COUNT)
        for replica in replicas:
            replica.engine.close()

    asyncio.run(run())


def body(prompt: str = "hello", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}


async def texts(client: httpx.AsyncClient, *bodies: dict[str, Any]) -> list[str]:
    found = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies))
    assert all(one.status_code == 200 for one in found), [one.text for one in found]
    return [one.json()["choices"][0]["text"] for one in found]
