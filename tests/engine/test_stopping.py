"""Stopping an answer keeps it: the conversation goes on as if the answer had ended there."""

from __future__ import annotations

import pytest

import msrnn
from msrnn.engine.lanes import LongEngine
from msrnn.engine.requests import Request
from msrnn.engine.session_id import SessionId
from tests.helpers.tiny import build, llama

pytestmark = pytest.mark.usefixtures("overlaps")

LONG = msrnn.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)


def begin(engine: msrnn.Engine, prompt: list[int], session: str | None = "talk") -> Request:
    request = engine.request(prompt, LONG, session)
    engine.add(request)
    return request


def run(engine: msrnn.Engine) -> None:
    while not engine.idle:
        engine.step()


def test_the_turn_is_kept(rnn: msrnn.MultiStateRNN) -> None:
    engine, plain = msrnn.Engine(rnn, slots=2), msrnn.Engine(rnn, slots=1, prefix_bytes=0, prefix_host_bytes=0)
    other, first = begin(engine, [9, 8, 7], None), begin(engine, [5, 6, 7])
    for _ in range(6):
        engine.step()
    assert engine.stop_session("talk")
    run(engine)
    answer = first.answers[0]
    assert answer.finish_reason == "stop"
    assert 2 < len(answer.tokens) < 10
    assert len(other.answers[0].tokens) == 60  # it is not stopped
    assert engine.sessions.turns("talk") == 1
    second = begin(engine, [11, 12])
    run(engine)
    (expected,) = plain.generate([[5, 6, 7, *answer.tokens, 11, 12]], LONG, progress=False)
    assert second.answers[0].tokens == expected.answers[0].tokens
    assert not engine.stop_session("talk")


@pytest.mark.parametrize("steps", [0, 1])
def test_before_the_first_token_nothing_is_kept(rnn: msrnn.MultiStateRNN, steps: int) -> None:
    engine = msrnn.Engine(rnn, slots=2, prompt_tokens=4)
    running = begin(engine, [3, 4], None)
    engine.step()
    request = begin(engine, [*range(3, 40)])
    for _ in range(steps):
        engine.step()
    assert engine.stop_session(SessionId("talk"))
    engine.step()
    assert request.answers[0].finish_reason == "cancelled"
    assert "talk" not in engine.sessions
    run(engine)
    assert len(running.answers[0].tokens) == 60


def test_the_answer_that_runs_is_stopped_and_not_one_that_waits(rnn: msrnn.MultiStateRNN) -> None:
    longer = msrnn.MultiStateRNN(rnn.model, "tova+1~40", 9, positions="compressed")
    engine = LongEngine(rnn, longer, 64, slots=4)
    running = begin(engine, [*range(3, 20)])  # passes 64 tokens with its answer
    for _ in range(6):
        engine.step()
    waiting = engine.request([5], msrnn.SamplingParams(max_tokens=2), "talk")
    engine.add(waiting)
    assert engine.stop_session("talk")
    assert (running.stopped, waiting.stopped) == (True, False)
    run(engine)
    assert running.answers[0].finish_reason == "stop"
