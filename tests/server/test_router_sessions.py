"""Sessions of a server with several replicas: each has one replica, and no message is read twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

import msrnn
from msrnn.server.affinity import assign_replica
from msrnn.server.router import Router
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.replicas_here import AT_ONCE, COUNT, Local, body, texts, with_router
from tests.helpers.step_orders import second_order_slow

pytestmark = second_order_slow


def test_sessions(tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(12)]
    homes = {assign_replica(name, COUNT) for name in names}
    assert len(homes) == COUNT

    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        alone = msrnn.Engine(msrnn.MultiStateRNN(character_model(), "tova", 16), 2, tokenizer=character_tokenizer())
        expected = []
        for words in ("hello", " and more"):
            request = alone.request(words, msrnn.SamplingParams(max_tokens=4, temperature=0), session="talk")
            alone.add(request)
            while not request.finished:
                alone.step()
            expected.append(request.answers[0].text)
        assert {*await texts(client, *(body(session_id=name) for name in names))} == {expected[0]}
        assert {*await texts(client, *(body(" and more", session_id=name) for name in names))} == {expected[1]}
        listed = (await client.get("/v1/sessions")).json()["data"]
        assert {session["id"]: session["turns"] for session in listed} == dict.fromkeys(names, 2)
        for number, replica in enumerate(replicas):
            own = {name for name in names if assign_replica(name, COUNT) == number}
            assert {info.name for info in replica.engine.sessions.infos()} == own

        # A fork belongs to the replica of its own name, and is a whole session there.
        fork = next(f"f{i}" for i in range(99) if assign_replica(f"f{i}", COUNT) != assign_replica("s0", COUNT))
        made = await client.post("/v1/sessions/s0/fork", json={"to": fork})
        assert made.status_code == 201
        again = await client.post("/v1/sessions/s1/fork", json={"to": fork})
        assert again.status_code == 409
        assert "exists already" in again.text
        assert await texts(client, body("more", session_id=fork)) == await texts(client, body("more", session_id="s0"))
        assert (await client.get(f"/v1/sessions/{fork}")).json()["turns"] == 3
        deleted = await client.delete(f"/v1/sessions/{fork}")
        assert deleted.status_code == 200
        assert (await client.get(f"/v1/sessions/{fork}/memory")).status_code == 404
        assert (await client.post("/v1/sessions/s1/fork", json={"to": fork})).status_code == 201
        late = await client.post("/v1/completions", json=body(session_id="s0", session_turns=1))
        assert late.status_code == 409
        assert late.json()["error"]["param"] == "session_turns"

    with_router(test, tmp_path)


def test_a_session_waits_for_its_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        home = replicas[assign_replica("talk", COUNT)]
        await texts(client, body(session_id="talk"), body(session_id="other"))
        home.dies_before = AT_ONCE
        waiting = asyncio.ensure_future(texts(client, body(" more", session_id="talk")))
        while router.pool.up[home.number]:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        home.engine.close()
        home.start()  # from the files
        home.dies_before = None
        router.pool.mark(home.number, up=True)
        assert await waiting == await texts(client, body(" more", session_id="other"))
        assert (await client.get("/v1/sessions/talk")).json()["turns"] == 2

        monkeypatch.setattr("msrnn.server.replica_pool.PATIENCE", 0.2)
        router.pool.mark(home.number, up=False)
        found = await client.post("/v1/completions", json=body(session_id="talk"))
        assert (found.status_code, found.headers["retry-after"]) == (503, "10")
        router.pool.mark(home.number, up=True)

    with_router(test, tmp_path)


def test_a_turn_that_is_saved_but_whose_answer_is_lost(tmp_path: Path) -> None:
    """The same words must not be read a second time."""

    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        home = replicas[assign_replica("talk", COUNT)]
        await texts(client, body(session_id="talk"))
        home.dies_before = 0

        async def start_again() -> None:
            while router.pool.up[home.number]:
                await asyncio.sleep(0.01)
            home.dies_before = None
            router.pool.mark(home.number, up=True)

        asked = client.post("/v1/completions", json=body(" more", session_id="talk"))
        found, _ = await asyncio.gather(asked, start_again())
        assert found.status_code == 409
        assert "has 2 finished turns, and not the 1 that this request follows" in found.text

    with_router(test, tmp_path)


def test_names_and_bodies_of_sessions(tmp_path: Path) -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        for name in ("\ud800", "", "a/b", "x" * 65):
            for turns in ({}, {"session_turns": 0}):
                content = json.dumps({**body(session_id=name), **turns}).encode()
                assert (await client.post("/v1/completions", content=content)).status_code == 400
            fork = json.dumps({"to": name}).encode()
            assert (await client.post("/v1/sessions/a/fork", content=fork)).status_code in (400, 404)
        # The body grows on its way: it is escaped, and gets a field. Only the first reader counts its bytes.
        prompt = "ж" * 300
        content = json.dumps(body(prompt, session_id="talk"), ensure_ascii=False).encode()
        assert len(content) < 1000
        assert (await client.post("/v1/completions", content=content)).status_code == 200

    with_router(test, tmp_path, body_bytes=1000)


def test_a_session_with_two_writers(tmp_path: Path) -> None:
    """Two processes that believe the session to be theirs: the one that comes late is refused."""

    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        home = replicas[assign_replica("talk", COUNT)]
        other = Local(home.number, tmp_path)
        await texts(client, body(session_id="talk"))
        router.pool.replicas = [other] * COUNT
        for turns, code in ((0, 409), (1, 200)):  # it has not seen the first turn, and then has
            found = await client.post("/v1/completions", json=body(" more", session_id="talk", session_turns=turns))
            assert found.status_code == code, found.text
        router.pool.replicas = replicas
        found = await client.post("/v1/completions", json=body(" more", session_id="talk"))
        assert found.status_code == 409
        assert "another process has continued it" in found.text
        await texts(client, body(" more", session_id="talk", session_turns=2))
        other.engine.close()

    with_router(test, tmp_path)


def test_what_is_not_repeated(tmp_path: Path) -> None:
    """A fork or a deletion may have been done by the replica that is lost."""

    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        await texts(client, body(session_id="talk"))
        fork = next(f"f{i}" for i in range(99) if assign_replica(f"f{i}", COUNT) == 1)
        replicas[1].dies_before = 0
        found = await client.post("/v1/sessions/talk/fork", json={"to": fork})
        assert (found.status_code, found.json()["error"]["code"]) == (503, "replica_down")

    with_router(test, tmp_path)
