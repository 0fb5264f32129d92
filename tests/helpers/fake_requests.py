"""Requests to an engine whose executor has no model: add them, run the engine, and read the answers."""

from __future__ import annotations

from typing import Any

from msrnn.engine.engine import Engine
from msrnn.engine.requests import Event, Request, SamplingParams
from tests.helpers.fake_executor import answer_to


def params(length: int = 5, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=length, **more)


def add(engine: Engine, prompt: list[int], length: int = 5, session: str | None = None, **more: Any) -> Request:
    request = engine.request(prompt, params(length, **more), session)
    engine.add(request)
    return request


def run(engine: Engine, steps: int = 10_000) -> list[Event]:
    """All events until nothing is left to do, or of some steps."""
    events: list[Event] = []
    while steps and not engine.idle:
        events += engine.step()
        steps -= 1
    return events


def tokens(*requests: Request) -> list[list[int]]:
    assert [request.answers[0].error for request in requests] == [None] * len(requests)
    return [request.answers[0].tokens for request in requests]


def text(seed: int, length: int) -> list[int]:
    return [2 + (seed * 31 + place * 7) % 90 for place in range(length)]


def conversation(turns: list[list[int]], length: int) -> list[list[int]]:
    """The answers to these turns; a turn that its limit ends has no stop token."""
    read: list[int] = []
    found = []
    for turn in turns:
        read += turn
        found.append(answer_to(read, length))
        read += found[-1]
    return found
