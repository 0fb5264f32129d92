"""Replicas on a Ray cluster of this machine: real processes, of which one is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

import msrnn
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.ray_here import cluster as cluster
from tests.helpers.ray_here import model as model
from tests.helpers.ray_here import processes
from tests.helpers.serving import serving

SESSIONS, TOKENS = 200, 3


@pytest.fixture(scope="module", autouse=True)
def overlaps() -> bool:
    """Replicas choose the order of their steps by themselves."""
    return False


async def talk(address: str, turns: int) -> list[list[str | None]]:
    """So many turns of each session, half of them streamed, while a replica is killed. None: the turn is finished, but
    its answer was lost with the replica.
    """
    answers: list[list[str | None]] = [[] for _ in range(SESSIONS)]
    counted: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=40)) as client:

        async def ask(session: int) -> None:
            turn, streamed = len(answers[session]), session % 2 == 0
            body = {"prompt": f"{session} says {turn}. ", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            asked = {**body, "session_id": f"s{session}", "session_turns": turn, "stream": streamed}
            found = await client.post(f"{address}/v1/completions", json=asked)
            if found.status_code == 409:
                assert f"has {turn + 1} finished turns" in found.text
                answers[session].append(None)
                return
            assert found.status_code == 200, found.text  # an answer that had not begun is not lost
            if not streamed:
                answers[session].append(found.json()["choices"][0]["text"])
                return
            events = [json.loads(line[6:]) for line in found.text.split("\n\n") if line.startswith("data: {")]
            if "error" in events[-1]:
                assert len(events) > 1, "the answer had not begun"
            else:
                answers[session].append("".join(event["choices"][0]["text"] for event in events))

        async def go_on(session: int) -> None:
            while len(answers[session]) < turns:
                await ask(session)
                counted["asked"] += 1
                if counted["asked"] == SESSIONS:
                    (number,) = processes("ServeReplica:msrnn-.*-1:server")
                    os.kill(number, signal.SIGKILL)

        await asyncio.gather(*map(go_on, range(SESSIONS)))
    return answers


def test_replicas(cluster: str, model: Path, tmp_path: Path) -> None:
    options = ("--model", model, "--size", 16, "--slots", 8, "--device", "cpu", "--sessions", tmp_path / "sessions")
    with serving(*options, "--replicas", 2, "--ray", cluster) as (server, address):
        answers = asyncio.run(talk(address, turns=2))
        listed = httpx.get(f"{address}/v1/sessions?limit={SESSIONS}", timeout=60).json()["data"]
        assert Counter(found["turns"] for found in listed) == {2: SESSIONS}
        assert httpx.get(f"{address}/health").json()["replicas_up"] == 2
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    assert not processes("ServeReplica:msrnn-")

    rnn, tokenizer = msrnn.MultiStateRNN(character_model(), "tova", 16), character_tokenizer()
    engine = msrnn.Engine(rnn, 8, tokenizer=tokenizer)
    params = msrnn.SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    for turn in range(2):
        asked = [
            engine.request(f"{session} says {turn}. ", params, session=f"s{session}") for session in range(SESSIONS)
        ]
        for request in asked:
            engine.add(request)
        while not engine.idle:
            engine.step()
        pairs = [(request.answers[0].text, session[turn]) for request, session in zip(asked, answers, strict=True)]
        assert all(answer in (expected, None) for expected, answer in pairs)
        assert sum(answer is None for _, answer in pairs) < SESSIONS // 10
