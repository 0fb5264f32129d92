"""One address for several replicas, which are servers in this process; in tests/distributed they are processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from characters import character_model, character_tokenizer
from starlette.types import Message, Scope

import msrnn
from msrnn.serve import front as front_file
from msrnn.serve.affinity import BLOCK, owner
from msrnn.serve.app import Server
from msrnn.serve.front import Front, LostReplicaError
from msrnn.serve.in_process import answered
from msrnn.serve.limits import Limits
from msrnn.serve.protocol import Served

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
            return owner(name, COUNT) == self.number

        rnn, tokenizer = msrnn.MultiStateRNN(character_model(), "tova", 16), character_tokenizer()
        self.engine = msrnn.Engine(rnn, 4, tokenizer=tokenizer, sessions=self.folder, owns_session=owns)
        self.app = Server(self.engine, Served("tiny", tokenizer, 16, 2000, self.engine.sessions), Limits()).app()

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        self.asked.append(scope["path"])
        if self.dies_before == AT_ONCE:
            raise LostReplicaError
        found = 0
        async with aclosing(answered(self.app, scope, body)) as messages:
            async for message in messages:
                if found == self.dies_before and scope["method"] == "POST":
                    raise LostReplicaError
                yield message
                found += 1

    async def ping(self) -> None:
        if self.dies_before is not None:
            raise LostReplicaError if self.dies_before == AT_ONCE else RuntimeError("anything else")


Test = Callable[[Front, list[Local], httpx.AsyncClient], Coroutine[Any, Any, None]]


def with_front(test: Test, folder: Path | None = None, **limits: Any) -> None:
    async def run() -> None:
        replicas = [Local(number, folder) for number in range(COUNT)]
        front = Front(replicas, Limits(**limits), sessions=folder is not None)
        transport = httpx.ASGITransport(front.app(), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=60) as client:
            await test(front, replicas, client)
        assert (front.active, front.loads) == (0, [0] * COUNT)
        for replica in replicas:
            replica.engine.close()

    asyncio.run(run())


def body(prompt: str = "hello", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}


async def texts(client: httpx.AsyncClient, *bodies: dict[str, Any]) -> list[str]:
    found = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies))
    assert all(one.status_code == 200 for one in found), [one.text for one in found]
    return [one.json()["choices"][0]["text"] for one in found]


def test_sessions(tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(12)]
    homes = {owner(name, COUNT) for name in names}
    assert len(homes) == COUNT

    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        alone = msrnn.Engine(replicas[0].engine.rnn, 2, tokenizer=character_tokenizer())
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
            own = {name for name in names if owner(name, COUNT) == number}
            assert {info.name for info in replica.engine.sessions.infos()} == own

        # A fork belongs to the replica of its own name, and is a whole session there.
        fork = next(f"f{i}" for i in range(99) if owner(f"f{i}", COUNT) != owner("s0", COUNT))
        made = await client.post("/v1/sessions/s0/fork", json={"to": fork})
        assert made.status_code == 201
        again = await client.post("/v1/sessions/s1/fork", json={"to": fork})
        assert again.status_code == 400
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

    with_front(test, tmp_path)


def test_a_replica_that_is_lost_before_it_answers() -> None:
    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        expected = await texts(client, body())
        for before in (AT_ONCE, 0, 1):
            front.mark(0, up=True)
            replicas[0].dies_before = before
            streams = [body(stream=True) for _ in range(6)]
            assert {*await texts(client, *(body() for _ in range(6)))} == {*expected}
            assert front.up == [False, True, True]
            front.mark(0, up=True)
            for found in await asyncio.gather(*(client.post("/v1/completions", json=one) for one in streams)):
                assert found.text.endswith("data: [DONE]\n\n")
                assert "error" not in found.text

    with_front(test)


def test_a_replica_that_is_lost_in_the_middle_of_a_stream() -> None:
    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        for replica in replicas:
            replica.dies_before = 3
        found = await client.post("/v1/completions", json=body(stream=True))
        *chunks, last = [line for line in found.text.split("\n\n") if line]
        assert len(chunks) == 2
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert front.up.count(False) == 1

    with_front(test)


def test_a_request_that_no_replica_survives() -> None:
    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        for replica in replicas:
            replica.dies_before = 0
        found = await client.post("/v1/completions", json=body())
        assert found.status_code == 500
        assert found.json()["error"]["message"] == "3 replicas ended while they answered this request"
        health = await client.get("/health")
        assert (health.status_code, health.json()["replicas_up"]) == (503, 0)

    with_front(test)


def test_a_session_waits_for_its_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        home = replicas[owner("talk", COUNT)]
        await texts(client, body(session_id="talk"), body(session_id="other"))
        home.dies_before = AT_ONCE
        waiting = asyncio.ensure_future(texts(client, body(" more", session_id="talk")))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert not front.up[home.number]
        home.engine.close()
        home.start()  # from the files
        home.dies_before = None
        front.mark(home.number, up=True)
        assert await waiting == await texts(client, body(" more", session_id="other"))
        assert (await client.get("/v1/sessions/talk")).json()["turns"] == 2

        monkeypatch.setattr(front_file, "PATIENCE", 0.2)
        front.mark(home.number, up=False)
        found = await client.post("/v1/completions", json=body(session_id="talk"))
        assert (found.status_code, found.headers["retry-after"]) == (503, "10")
        front.mark(home.number, up=True)

    with_front(test, tmp_path)


def test_a_turn_that_is_saved_but_whose_answer_is_lost(tmp_path: Path) -> None:
    """The same words must not be read a second time."""

    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        home = replicas[owner("talk", COUNT)]
        await texts(client, body(session_id="talk"))
        home.dies_before = 0

        async def start_again() -> None:
            while front.up[home.number]:
                await asyncio.sleep(0.01)
            home.dies_before = None
            front.mark(home.number, up=True)

        asked = client.post("/v1/completions", json=body(" more", session_id="talk"))
        found, _ = await asyncio.gather(asked, start_again())
        assert found.status_code == 409
        assert "has 2 finished turns, and not the 1 that this request follows" in found.text

    with_front(test, tmp_path)


def test_beginnings_go_to_one_replica() -> None:
    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
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

    with_front(test)


def test_what_the_front_says_itself(tmp_path: Path) -> None:
    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
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
        front.draining = True
        assert (await client.post("/v1/completions", json=body(), headers=keyed)).status_code == 503
        assert (await client.get("/health")).status_code == 503

    with_front(test, keys=["secret"], body_bytes=1000)


def test_a_client_that_leaves() -> None:
    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        asked: list[Message] = [{"type": "http.request", "body": json.dumps(body(max_tokens=1900)).encode()}]
        left = asyncio.Event()

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise AssertionError(f"{message} for nobody")

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        app = asyncio.ensure_future(front.app()(scope, receive, send))
        while not any(replica.engine.counts["rows"] for replica in replicas):
            await asyncio.sleep(0.01)
        left.set()
        await app
        for _ in range(200):
            if not any(replica.engine.counts["rows"] for replica in replicas):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the row is not free")

    with_front(test)


def test_names_and_bodies_of_sessions(tmp_path: Path) -> None:
    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        for name in ("\ud800", "", "a/b", "x" * 65):
            for turns in ({}, {"session_turns": 0}):
                content = json.dumps(body(session_id=name, **turns)).encode()
                assert (await client.post("/v1/completions", content=content)).status_code == 400
            fork = json.dumps({"to": name}).encode()
            assert (await client.post("/v1/sessions/a/fork", content=fork)).status_code in (400, 404)
        # The body grows on its way: it is escaped, and gets a field. Only the first reader counts its bytes.
        prompt = "ж" * 300
        content = json.dumps(body(prompt, session_id="talk"), ensure_ascii=False).encode()
        assert len(content) < 1000
        assert (await client.post("/v1/completions", content=content)).status_code == 200

    with_front(test, tmp_path, body_bytes=1000)


def test_a_session_with_two_writers(tmp_path: Path) -> None:
    """Two processes that believe the session to be theirs: the one that comes late is refused."""

    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        home = replicas[owner("talk", COUNT)]
        other = Local(home.number, tmp_path)
        await texts(client, body(session_id="talk"))
        front.replicas = [other] * COUNT
        for turns, code in ((0, 500), (1, 200)):  # it has not seen the first turn, and then has
            found = await client.post("/v1/completions", json=body(" more", session_id="talk", session_turns=turns))
            assert found.status_code == code, found.text
        front.replicas = replicas
        found = await client.post("/v1/completions", json=body(" more", session_id="talk"))
        assert found.status_code == 500
        assert "another process has gone on with it" in found.text
        await texts(client, body(" more", session_id="talk", session_turns=2))
        other.engine.close()

    with_front(test, tmp_path)


def test_a_replica_that_hangs_or_is_lost_while_metrics_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_file, "METRICS_TIMEOUT", 0.5)

    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        async def hanging(scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
            await asyncio.sleep(60)
            yield {}

        replicas[0].dies_before = AT_ONCE
        monkeypatch.setattr(replicas[1], "answer", hanging)
        text = (await client.get("/metrics")).text
        assert 'replica="2"' in text
        assert 'replica="1"' not in text
        # A prompt that waits for such a replica goes elsewhere when the replica is found to be down.
        front.mark(0, up=False)
        front.mark(2, up=False)
        waiting = asyncio.ensure_future(texts(client, body()))
        await asyncio.sleep(0.2)
        front.mark(2, up=True)
        front.mark(1, up=False)
        await waiting

    with_front(test)


def test_what_is_not_repeated(tmp_path: Path) -> None:
    """A fork or a deletion may have been done by the replica that is lost."""

    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        await texts(client, body(session_id="talk"))
        fork = next(f"f{i}" for i in range(99) if owner(f"f{i}", COUNT) == 1)
        replicas[1].dies_before = 0
        found = await client.post("/v1/sessions/talk/fork", json={"to": fork})
        assert (found.status_code, found.json()["error"]["code"]) == (503, "replica_down")

    with_front(test, tmp_path)


def test_replicas_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_file, "PING_SECONDS", 0.01)

    async def test(front: Front, replicas: list[Local], client: httpx.AsyncClient) -> None:
        app = front.app()
        async with app.router.lifespan_context(app):
            for how in (AT_ONCE, 0):
                replicas[1].dies_before = how
                while front.up != [True, False, True]:
                    await asyncio.sleep(0.01)
                replicas[1].dies_before = None
                while not all(front.up):
                    await asyncio.sleep(0.01)

    with_front(test)
