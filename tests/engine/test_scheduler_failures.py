"""Answers that are cancelled or fail leave the others as they are; the executor has no model."""

from __future__ import annotations

from typing import Any

import pytest

from msrnn.engine.engine import Engine
from msrnn.engine.executor import SamplerSpec
from msrnn.engine.scheduler import Counts
from tests.helpers.fake_executor import FakeExecutor, answer_to
from tests.helpers.fake_requests import add, run, text, tokens


@pytest.fixture
def executor(overlaps: bool) -> FakeExecutor:
    return FakeExecutor(slots=4, overlaps=overlaps)


@pytest.mark.parametrize("which", range(4))
def test_a_cancelled_answer_leaves_the_others_as_they_are(executor: FakeExecutor, which: int) -> None:
    """Whichever slot it has; its place is taken by the last one."""
    engine = Engine(executor)
    requests = [add(engine, text(number, 4), 12) for number in range(6)]
    run(engine, 4)
    requests[which].cancel()
    requests[5].cancel()  # it waits still
    events = run(engine)
    assert {event.request for event in events if event.finish_reason == "cancelled"} == {requests[which], requests[5]}
    others = [number for number in range(5) if number != which]
    assert tokens(*(requests[number] for number in others)) == [answer_to(text(number, 4), 12) for number in others]
    assert engine.counts == Counts(waiting=0, prefill=0, running=0)
    assert not engine.under_way


def test_a_cancelled_prompt_is_read_no_further(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.engine.scheduler.ALONE", {"cpu": 8})
    engine = Engine(executor, prompt_tokens=8)
    request = add(engine, text(1, 1000))
    engine.step()
    request.cancel()
    run(engine)
    assert executor.calls == [("read", 8)]
    assert request.answers[0].finish_reason == "cancelled"


def test_an_answer_that_cannot_be_sampled_fails_alone(executor: FakeExecutor) -> None:
    executor.broken = {9}
    engine = Engine(executor)
    sound, broken, other = add(engine, [5, 6]), add(engine, [9, 6]), add(engine, [7])
    run(engine)
    assert (broken.answers[0].finish_reason, broken.answers[0].tokens) == ("error", [])
    assert tokens(sound, other) == [answer_to([5, 6], 5), answer_to([7], 5)]


def test_a_sampler_that_cannot_be_made_fails_alone(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    make = executor.new_sampler

    def failing(state: Any, spec: SamplerSpec) -> Any:
        return make(state, spec) if spec.prompt != [9] else 1 / 0

    monkeypatch.setattr(executor, "new_sampler", failing)
    engine = Engine(executor)
    broken, sound = add(engine, [9]), add(engine, [5, 6])
    run(engine)
    assert broken.answers[0].error == "internal error (ZeroDivisionError)"
    assert tokens(sound) == [answer_to([5, 6], 5)]


def test_a_tokenizer_that_fails_ends_one_answer(executor: FakeExecutor) -> None:
    class Tokenizer:
        def decode(self, ids: list[int], **_: Any) -> str:
            assert answer_to([9], 3)[2] not in ids
            return "x" * len(ids)

    engine = Engine(executor, tokenizer=Tokenizer())
    broken, sound = add(engine, [9]), add(engine, [5, 6], 2)
    run(engine)
    assert broken.answers[0].error == "internal error (AssertionError)"
    assert sound.answers[0].text == "xx"


@pytest.mark.parametrize("call", ["step", "read", "put"])
def test_a_failed_call_ends_what_is_under_way_alone(
    executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    engine = Engine(executor)
    under_way = [add(engine, text(number, 4), 20) for number in range(3)]
    run(engine, 3)
    waiting = [add(engine, text(number, 4), 20, n=2) for number in (3, 4)]

    def failing(*_: Any) -> Any:
        raise RuntimeError("a broken device")

    with monkeypatch.context() as patch:
        patch.setattr(executor, call, failing)
        if call != "step":
            under_way.append(add(engine, [8]))
            engine.queue.waiting.rotate(1)  # it comes before those that need two slots
        with pytest.raises(RuntimeError, match="a broken device"):
            engine.step()
    assert {request.answers[0].finish_reason for request in under_way} == {"error"}
    run(engine)
    assert tokens(*waiting) == [answer_to(text(number, 4), 20) for number in (3, 4)]
