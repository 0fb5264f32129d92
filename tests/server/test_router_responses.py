"""Responses of a server with several replicas: a conversation stays with the replica that began it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from msrnn.server.affinity import assign_replica
from msrnn.server.response_ids import parse_response_id
from msrnn.server.router import Router
from tests.helpers.replicas_here import COUNT, Local, with_router
from tests.helpers.step_orders import second_order_slow

pytestmark = second_order_slow

PATH = "/v1/responses"


def body(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": 4, "temperature": 0, **more}


async def respond(client: httpx.AsyncClient, *bodies: dict[str, Any]) -> list[Any]:
    found = await asyncio.gather(*(client.post(PATH, json=one) for one in bodies))
    assert all(one.status_code == 200 for one in found), [one.text for one in found]
    return [one.json() for one in found]


def home_of(response: Any) -> int:
    found = parse_response_id(response["id"])
    assert found is not None
    return assign_replica(found.session, COUNT)


def texts(responses: list[Any]) -> set[str]:
    return {response["output"][0]["content"][0]["text"] for response in responses}


def test_conversations(tmp_path: Path) -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        first = await respond(client, *(body() for _ in range(12)))
        assert len({home_of(one) for one in first}) > 1
        for response in first:
            names = {info.name for info in replicas[home_of(response)].engine.sessions.infos()}
            assert response["id"].rpartition("_")[0] in names
        assert len(texts(first)) == 1
        second = await respond(client, *(body("more", previous_response_id=one["id"]) for one in first))
        about = {"max_tokens": 4, "temperature": 0, "session_id": "same"}
        for words, found in (("hello", first), ("more", second)):
            message = {"messages": [{"role": "user", "content": words}], **about}
            choice = (await client.post("/v1/chat/completions", json=message)).json()["choices"][0]
            assert texts(found) == {choice["message"]["content"]}
        late = await client.post(PATH, json=body("more", previous_response_id=first[0]["id"]))
        assert (late.status_code, late.json()["error"]["code"]) == (400, "previous_response_not_found")
        for unknown in (f"resp_{'0' * 32}_1", "resp_x", 3):
            assert (await client.post(PATH, json=body(previous_response_id=unknown))).status_code == 400
        assert (await client.delete(f"{PATH}/{first[0]['id']}")).status_code == 404
        assert (await client.delete(f"{PATH}/{second[0]['id']}")).json()["deleted"] is True
        gone = await client.post(PATH, json=body("more", previous_response_id=second[0]["id"]))
        assert gone.status_code == 400
        assert "without its text" in (await client.get(f"{PATH}/{second[1]['id']}")).text

    with_router(test, tmp_path)


def test_a_response_is_not_read_twice(tmp_path: Path) -> None:
    """A replica that ends after it has saved the turn: the request is sent again, and refused."""

    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        (first,) = await respond(client, body())
        home = replicas[home_of(first)]
        home.dies_before = 0  # before the first message of the answer, which is after the turn was saved
        waiting = asyncio.ensure_future(client.post(PATH, json=body("more", previous_response_id=first["id"])))
        while router.pool.up[home.number]:
            await asyncio.sleep(0.01)
        home.dies_before = None
        home.engine.close()
        home.start()
        router.pool.mark(home.number, up=True)
        found = await waiting
        assert found.status_code == 400
        newest = f"{first['id'].rpartition('_')[0]}_2"
        assert found.json()["error"]["message"].endswith(newest)
        assert (await respond(client, body("and", previous_response_id=newest)))[0]["status"] == "incomplete"

    with_router(test, tmp_path)


def test_replicas_without_a_folder_keep_nothing() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        found = await client.post(PATH, json=body())
        error = found.json()["error"]
        assert (found.status_code, error["param"], error["code"]) == (400, "store", "no_sessions")
        assert "send store: false, or start it with --sessions FOLDER" in error["message"]
        assert (await respond(client, body(store=False)))[0]["store"] is False
        assert (await client.post(PATH, content=b"[]")).status_code == 400
        assert (await client.delete(f"{PATH}/resp_{'0' * 32}_1")).status_code == 400

    with_router(test)


def test_a_common_prefix_prefers_one_replica() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        for number in range(3):
            for instructions in ("a" * 600, "b" * 600):
                await respond(client, body(f"hello {number}", store=False, instructions=instructions))
        asked = [replica.asked.count(PATH) for replica in replicas]
        assert sorted(asked)[-1] in (3, 6)
        assert sum(asked) == 6

    with_router(test)
