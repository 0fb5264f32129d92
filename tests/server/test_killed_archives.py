"""`msrnn serve --recall` is killed while sessions with archives are answering: each goes on from its last turn."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

import msrnn
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.serving import ask, serving

SESSIONS, TOKENS, KILLED_AFTER = 8, 3, 26
PARAMS = msrnn.SamplingParams(max_tokens=TOKENS, temperature=0)


def message(session: int, turn: int) -> str:
    """About three messages fill a segment."""
    return " ".join(f"{session} says {word} in {turn}." for word in range(20 + session % 3))


def body(session: int, turn: int) -> dict[str, Any]:
    fields = {"max_tokens": TOKENS, "temperature": 0, "session_id": f"s{session}"}
    return {"prompt": message(session, turn), **fields}


async def talk_until_killed(address: str, server: subprocess.Popen[str], texts: list[list[str]]) -> None:
    """All sessions at once; `texts` are the answers whose end their client has seen."""

    async def talk(session: int) -> None:
        try:
            while (reply := await ask(address, body(session, len(texts[session])))).finish_reason is not None:
                texts[session].append(reply.text)
                if sum(map(len, texts)) == KILLED_AFTER:
                    os.kill(server.pid, signal.SIGKILL)
        except (OSError, RuntimeError, ValueError):
            return

    await asyncio.gather(*map(talk, range(SESSIONS)))


def replay(engine: msrnn.Engine, session: int, turns: int) -> list[str]:
    """The answers of a session that nothing interrupts."""
    tokenizer, texts = character_tokenizer(), []
    for turn in range(turns):
        prompt = tokenizer(message(session, turn), add_special_tokens=turn == 0)["input_ids"]
        request = engine.request(prompt, PARAMS, f"s{session}")
        engine.add(request)
        while not request.finished:
            engine.step()
        texts.append(request.answers[0].text)
    return texts


@pytest.mark.slow
def test_sessions_with_archives_of_a_server_that_is_killed(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    options: list[Any] = ["--model", model, "--size", 16, "--recall", 8, "--positions", "original", "--device", "cpu"]
    options += ["--slots", 4, "--sessions", folder]
    seen: list[list[str]] = [[] for _ in range(SESSIONS)]
    with serving(*options) as (server, address):
        asyncio.run(talk_until_killed(address, server, seen))
        assert server.wait(30) == -signal.SIGKILL
    assert [*folder.glob("*.archive/*")]
    with serving(*options) as (_, address):
        listed = {one["id"]: one["turns"] for one in httpx.get(f"{address}/v1/sessions").json()["data"]}
        turns = [listed.get(f"s{session}", 0) for session in range(SESSIONS)]
        assert all(len(texts) <= has <= len(texts) + 1 for texts, has in zip(seen, turns, strict=True))
        forked = httpx.post(f"{address}/v1/sessions/s0/fork", json={"to": "fork"})
        assert forked.status_code in (200, 201)
        next_ones = [asyncio.run(ask(address, body(session, turn))).text for session, turn in enumerate(turns)]
        of_fork = asyncio.run(ask(address, {**body(0, turns[0]), "session_id": "fork"})).text
        for name in [*(f"s{session}" for session in range(SESSIONS)), "fork"]:
            assert httpx.delete(f"{address}/v1/sessions/{name}").status_code < 300
    assert [*folder.iterdir()] == []
    rnn = msrnn.MultiStateRNN(character_model(), "tova", 16, recall=8)
    engine = msrnn.Engine(rnn, slots=2, tokenizer=character_tokenizer())
    for session, (texts, has) in enumerate(zip(seen, turns, strict=True)):
        expected = replay(engine, session, has + 1)
        assert [*texts, next_ones[session]] == [*expected[: len(texts)], expected[-1]]
    assert of_fork == next_ones[0]
