"""A turn of a session, answered by an engine that has nothing else to do."""

from __future__ import annotations

import msrnn
from msrnn.engine.requests import Request

GREEDY = msrnn.SamplingParams(temperature=0, max_tokens=4)


def ask(engine: msrnn.Engine, prompt: list[int], session: str, owner: str = "") -> Request:
    request = engine.request(prompt, GREEDY, session, owner=owner)
    engine.add(request)
    while not engine.idle:
        engine.step()
    return request
