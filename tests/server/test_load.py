"""Many clients at once, of which some leave: all others get their answers, and everything is given back."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random

import httpx
import pytest

import msrnn
from msrnn.hf.loading import Loaded
from msrnn.server.limits import Limits
from tests.helpers.live_server import Live, greedy, live, post, wait_until
from tests.helpers.serving import ask_at_once, leaving, usage_of

CLIENTS, TOKENS = 100, 6


def in_use(found: Live) -> dict[str, int]:
    """Everything that a request holds while it is answered."""
    engine, server = found.server.engine, found.server
    return {
        **engine.counts._asdict(),
        "active": server.active,
        "tasks": found.tasks(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def more_than(before: dict[str, int], found: Live) -> dict[str, int]:
    return {name: count for name, count in in_use(found).items() if count > before[name]}


def test_many_clients_of_which_some_leave(rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    rnn = msrnn.MultiStateRNN(rnn.model, "tova", 48)  # states that are large enough for a leak to be seen
    draw = random.Random(0)
    prompts = [[draw.randrange(1000, 40000) for _ in range(draw.randint(3, 30))] for _ in range(20)]
    expected = [small.tokenizer.decode(greedy(rnn, prompt, TOKENS)) for prompt in prompts]
    ask = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    bodies = [{"prompt": prompts[i % len(prompts)], **ask} for i in range(CLIENTS)]
    engine = msrnn.Engine(rnn, slots=16, tokenizer=small.tokenizer)
    memory, objects = [], []
    with live(engine, Limits(queue=CLIENTS)) as found:
        gc.collect()  # what earlier tests have left open
        before = in_use(found)
        for round_ in range(3):
            leave = leaving(CLIENTS, TOKENS - 1, seed=round_)
            replies = asyncio.run(ask_at_once(found.address, bodies, leave))
            stayed = [i for i in range(CLIENTS) if leave[i] is None]
            assert len(stayed) == CLIENTS * 4 // 5
            assert [replies[i].text for i in stayed] == [expected[i % len(prompts)] for i in stayed]
            assert {replies[i].finish_reason for i in stayed} == {"length"}
            wait_until(lambda: not more_than(before, found))
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # or what is free but not given back hides a leak
            memory.append(usage_of(os.getpid())["rss_mb"])
            objects.append(len(gc.get_objects()))
        assert not engine.under_way
        assert engine._loop is not None
        assert not engine._loop._consumers
    assert memory[2] - memory[1] < 30  # a kept state for each client would be 60
    assert objects[2] - objects[1] < CLIENTS  # one for each client would be a leak


def test_a_failing_device_is_seen_from_outside(
    rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    engine = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer)
    with live(engine, Limits()) as found:
        with monkeypatch.context() as patch:
            patch.setattr(engine.executor, "step", broken)
            codes = []
            for _ in range(3):
                codes.append(httpx.get(f"{found.address}/health").status_code)
                failed = post(found.address, {"prompt": "a", "max_tokens": 3})
                assert (failed.status_code, "CUDA" in failed.text) == (500, False)
            assert codes == [200] * 3
            assert httpx.get(f"{found.address}/health").status_code == 503
        assert post(found.address, {"prompt": "a", "max_tokens": 3}).status_code == 200
        assert httpx.get(f"{found.address}/health").status_code == 200
