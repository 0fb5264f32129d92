"""`msrnn serve` is killed while 50 sessions are answering: each goes on from its last finished turn."""

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
from tests.helpers.characters import END, character_model, character_tokenizer
from tests.helpers.live_server import greedy
from tests.helpers.serving import Reply, ask, serving

SESSIONS, TOKENS, KILLED_AFTER = 50, 3, 60


def message(session: int, turn: int) -> str:
    return f"{session} says {'more ' * (turn % 3)}{turn}. "


def body(session: int, turn: int) -> dict[str, Any]:
    fields = {"max_tokens": TOKENS, "temperature": 0, "session_id": f"s{session}"}
    return {"prompt": message(session, turn), **fields}


async def talk_until_killed(address: str, server: subprocess.Popen[str], texts: list[list[str]]) -> None:
    """All sessions at once; `texts` are the answers whose end their client has seen."""

    async def talk(session: int) -> None:
        while True:
            try:
                reply = await ask(address, body(session, len(texts[session])))
            except (OSError, RuntimeError, ValueError):
                return
            if reply.finish_reason is None:
                return
            texts[session].append(reply.text)
            if sum(map(len, texts)) == KILLED_AFTER:
                os.kill(server.pid, signal.SIGKILL)

    await asyncio.gather(*(talk(session) for session in range(SESSIONS)))


async def go_on(address: str, turns: list[int]) -> list[Reply]:
    return await asyncio.gather(*(ask(address, body(session, turn)) for session, turn in enumerate(turns)))


def replayed(rnn: msrnn.MultiStateRNN, tokenizer: Any, session: int, turns: int) -> list[str]:
    """The answers of a conversation that nothing interrupts, each to the whole history."""
    history: list[int] = []
    texts = []
    for turn in range(turns):
        history += tokenizer(message(session, turn), add_special_tokens=turn == 0)["input_ids"]
        answer = greedy(rnn, history, TOKENS)
        texts.append(tokenizer.decode(answer[:-1] if answer[-1] == END else answer, skip_special_tokens=True))
        history += answer
    return texts


@pytest.mark.slow
def test_sessions_of_a_server_that_is_killed(model: Path, tmp_path: Path) -> None:
    options = ("--model", model, "--size", 16, "--slots", 4, "--sessions", tmp_path / "sessions", "--device", "cpu")
    seen: list[list[str]] = [[] for _ in range(SESSIONS)]
    with serving(*options) as (server, address):
        asyncio.run(talk_until_killed(address, server, seen))
        assert server.wait(30) == -signal.SIGKILL
    assert sum(map(len, seen)) >= KILLED_AFTER
    with serving(*options) as (_, address):
        listed = httpx.get(f"{address}/v1/sessions").json()["data"]
        turns = {found["id"]: found["turns"] for found in listed}
        found = [turns.get(f"s{session}", 0) for session in range(SESSIONS)]
        assert all(len(texts) <= has <= len(texts) + 1 for texts, has in zip(seen, found, strict=True))
        assert len({*found}) > 1
        replies = asyncio.run(go_on(address, found))
    rnn, tokenizer = msrnn.MultiStateRNN(character_model(), "tova", 16), character_tokenizer()
    for session, (texts, has, reply) in enumerate(zip(seen, found, replies, strict=True)):
        expected = replayed(rnn, tokenizer, session, has + 1)
        assert [*texts, reply.text] == [*expected[: len(texts)], expected[-1]]
        assert reply.finish_reason in ("stop", "length")
    assert not [*(tmp_path / "sessions").glob(".*")]
