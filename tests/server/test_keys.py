"""Keys are told apart: what one key has made, another one cannot see, use, end or guess."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.hf.loading import Loaded
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
