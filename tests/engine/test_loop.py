"""The thread that runs an engine: an error of one request is not the end of it."""

from __future__ import annotations

import asyncio

import pytest

import msrnn
from msrnn.engine.requests import Request
from tests.helpers.tiny import build, llama

PARAMS = msrnn.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_a_request_that_cannot_be_added_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = msrnn.Engine(msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9), slots=2)
    add = engine.add

    def refuse(request: Request) -> None:
        if request.prompt == [66]:
            raise BrokenPipeError(32, "Broken pipe")
        add(request)

    monkeypatch.setattr(engine, "add", refuse)

    async def ask(prompt: list[int]) -> list[int | None]:
        return [event.token async for event in engine.stream(prompt, PARAMS)]

    async def run() -> list[list[int | None] | BaseException]:
        first = await asyncio.gather(ask([5, 6]), ask([66]), ask([7]), return_exceptions=True)
        return [*first, await ask([5, 6])]

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert isinstance(found[1], BrokenPipeError)
    assert [len(found[place]) for place in (0, 2, 3)] == [3, 3, 3]  # type: ignore[arg-type]
    assert engine.healthy
    engine.close()
