"""Keys are told apart: what one key has made, another one cannot see, use, end or guess."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.engine.session_id import is_owner
from msrnn.hf.loading import Loaded
from msrnn.server.keys import KeyCheck, is_guarded, owner_of
from msrnn.server.limits import Limits
from tests.helpers.live_server import running, slow_down

ANN, BOB = {"Authorization": "Bearer sk-ann"}, {"Authorization": "Bearer sk-bob"}
SECRET = "The password of the vault is a rose is a rose, and the guard sleeps from two to four every night of May."


@pytest.fixture
def engine(rnn: msrnn.MultiStateRNN, small: Loaded) -> msrnn.Engine:
    return msrnn.Engine(rnn, slots=4, tokenizer=small.tokenizer)


@pytest.fixture
def address(engine: msrnn.Engine) -> Iterator[str]:
    with running(engine, Limits(keys=["sk-ann", "sk-bob"])) as found:
        yield found


def complete(address: str, headers: dict[str, str], **body: Any) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0, **body}
    return httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60)


def test_sessions(address: str) -> None:
    sessions = f"{address}/v1/sessions"
    for _ in range(2):
        assert complete(address, ANN, session_id="diary").status_code == 200
    assert [found["id"] for found in httpx.get(sessions, headers=ANN).json()["data"]] == ["diary"]
    assert httpx.get(sessions, headers=BOB).json()["data"] == []
    for path in ("/diary", "/diary/memory"):
        assert httpx.get(sessions + path, headers=BOB).status_code == 404
    assert httpx.post(f"{sessions}/diary/fork", json={"to": "mine"}, headers=BOB).status_code == 404
    assert httpx.post(f"{sessions}/diary/stop", headers=BOB).status_code == 404
    assert httpx.delete(f"{sessions}/diary", headers=BOB).status_code == 404
    assert complete(address, BOB, session_id="diary", session_turns=2).status_code == 409
    assert complete(address, BOB, session_id="diary").status_code == 200  # Bob's own, of the same name
    turns = [httpx.get(f"{sessions}/diary", headers=key).json()["turns"] for key in (ANN, BOB)]
    assert turns == [2, 1]
    assert httpx.delete(f"{sessions}/diary", headers=BOB).status_code == 200
    assert httpx.get(f"{sessions}/diary", headers=ANN).status_code == 200


def test_an_answer_of_another_key_goes_on(address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(engine, monkeypatch)
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "session_id": "busy", "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=ANN, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert httpx.post(f"{address}/v1/sessions/busy/stop", headers=BOB).status_code == 404
        assert complete(address, BOB, session_id="busy").status_code == 200
        assert httpx.post(f"{address}/v1/sessions/busy/stop", headers=ANN).json()["stopped"]
        finished = [line for line in lines if '"finish_reason": "stop"' in line]
    assert len(finished) == 1
    assert httpx.get(f"{address}/v1/sessions/busy", headers=ANN).json()["turns"] == 1


def test_a_prompt_cannot_be_guessed_from_the_cache(address: str) -> None:
    def cached(key: dict[str, str], prompt: str) -> int:
        found = complete(address, key, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(found, int)
        return found

    assert cached(ANN, SECRET) == 0
    assert cached(BOB, SECRET + " Really.") == 0
    assert cached(ANN, SECRET + " Really.") > 20


def owner(key: bytes | None, path: str = "/v1/models", keys: Sequence[str] = ("sk-ann", "sk-bob")) -> str | None:
    """The owner that the application sees; None: the request is refused."""
    found: list[Any] = []
    headers = [] if key is None else [(b"authorization", key)]

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 401

    async def app(scope: Any, *_: Any) -> None:
        found.append(owner_of(scope))

    scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
    asyncio.run(KeyCheck(app, keys)(scope, None, send))  # type: ignore[arg-type]
    return found[0] if found else None


def test_the_owner_of_a_key() -> None:
    ann, bob = owner(b"Bearer sk-ann"), owner(b"bearer  sk-bob ")
    assert ann is not None
    assert bob is not None
    assert ann != bob
    assert is_owner(ann)
    assert "ann" not in ann
    assert owner(b"Bearer sk-ann", keys=["sk-ann"]) == ann  # other keys do not change it


@pytest.mark.parametrize("key", [None, b"", b"Bearer", b"Bearer sk-eve", b"Basic sk-ann", b"sk-ann", b"Bearer \xff"])
def test_wrong_keys(key: bytes | None) -> None:
    assert owner(key) is None
    assert owner(key, keys=()) == ""


def test_paths_that_need_a_key() -> None:
    assert [is_guarded(path) for path in ("/v1", "/v1/models", "/v1x", "/health", "/")] == [True, True, *[False] * 3]
    assert owner(None, "/health") == ""
