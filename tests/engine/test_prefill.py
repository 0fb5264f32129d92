"""Prompts are read in turns: a short one does not wait for a long one, and the answers stay what they are."""

from __future__ import annotations

import pytest

import msrnn
from msrnn.engine import prefill
from msrnn.engine.requests import Request
from tests.helpers.fake_executor import FakeExecutor, answer_to

pytestmark = pytest.mark.usefixtures("overlaps")

PARAMS = msrnn.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def text(length: int, seed: int) -> list[int]:
    return [3 + (seed * 31 + place * 7 + place // 5) % 80 for place in range(length)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "LONG", 20)
    monkeypatch.setattr("msrnn.engine.scheduler.ALONE", {"cpu": 8})


def new_engine(slots: int = 8) -> msrnn.Engine:
    return msrnn.Engine(FakeExecutor(slots), prompt_tokens=8)


def finishing_order(engine: msrnn.Engine, requests: list[Request]) -> list[int]:
    order: list[int] = []
    while not engine.idle:
        for event in engine.step():
            if event.finish_reason:
                order.append(requests.index(event.request))
    return order


def expected(requests: list[Request]) -> list[list[int]]:
    return [answer_to(request.prompt, PARAMS.max_tokens) for request in requests]


def test_short_prompts_come_first() -> None:
    engine = new_engine()
    requests = [engine.request(text(length, length), PARAMS) for length in (400, 390, 12, 30, 11)]
    engine.add(requests[0])
    engine.step()
    for request in requests[1:]:
        engine.add(request)
    order = finishing_order(engine, requests)
    assert set(order[:3]) == {2, 3, 4}
    assert [request.answers[0].tokens for request in requests] == expected(requests)


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("length", [3, 10])
@pytest.mark.parametrize("count", [1, 3])
def test_a_long_prompt_is_not_held_up_for_ever(count: int, length: int, parity: int) -> None:
    """Short prompts that never end still leave it every fourth turn, however many of them are read in a step."""
    engine = new_engine()
    long = engine.request(text(120, 1), PARAMS)
    engine.add(long)
    engine.queue._chunks = parity
    steps = 0
    while not long.finished:
        for number in range(count - len(engine.queue.waiting)):
            engine.add(engine.request(text(length, 100 * steps + number), PARAMS))
        engine.step()
        steps += 1
        assert steps < 150
    assert [long.answers[0].tokens] == expected([long])


def test_a_cancel_waits_for_one_block() -> None:
    engine = new_engine()
    long = engine.request(text(4000, 1), PARAMS)
    engine.add(long)
    engine.step()
    (one,) = engine.queue.prefills
    assert one.done == 8
    long.cancel()
    engine.step()
    assert long.answers[0].finish_reason == "cancelled"
    assert engine.idle


def test_a_prompt_waits_for_the_state_that_serves_it() -> None:
    """What prompts share is read once, also if the first of them is long."""
    engine = new_engine()
    shared = text(200, 1)
    requests = [engine.request([*shared, *text(300, 2)], PARAMS), engine.request([*shared, 5, 6], PARAMS)]
    for request in requests:
        engine.add(request)
    finishing_order(engine, requests)
    assert requests[1].cached_tokens == 200
    assert [request.answers[0].tokens for request in requests] == expected(requests)


def test_turns_of_a_session_stay_in_order() -> None:
    engine = new_engine()
    long = engine.request(text(400, 1), PARAMS)
    first, second = engine.request(text(390, 2), PARAMS, "talk"), engine.request([5], PARAMS, "talk")
    for request in (long, first, second):
        engine.add(request)
    finishing_order(engine, [long, first, second])
    assert first.answers[0].finish_reason == "length"
    assert second.answers[0].finish_reason == "error"  # it was made for the first turn


def test_rows_are_reserved_for_prompts_that_are_read() -> None:
    engine = new_engine(slots=2)
    requests = [engine.request(text(length, length), PARAMS) for length in (400, 12, 11, 10, 30)]
    engine.add(requests[0])
    engine.step()
    for request in requests[1:]:
        engine.add(request)
    finishing_order(engine, requests)
    assert [request.answers[0].tokens for request in requests] == expected(requests)


def test_a_session_that_waits_for_the_disk_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    session, plain = engine.request([5, 6], PARAMS, "talk"), engine.request([7, 8], PARAMS)
    for request in (session, plain):
        engine.add(request)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.sessions), "behind", True)
        while not plain.finished:
            engine.step()
        assert not session.answers[0].tokens
    finishing_order(engine, [session])
    assert session.answers[0].finish_reason == "length"
