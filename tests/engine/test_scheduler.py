"""What an engine decides, with an executor that has no model: order, fairness, ends, failures, sessions, lanes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msrnn.engine import prefill as prefill_module
from msrnn.engine.engine import Engine
from msrnn.engine.lanes import LongEngine
from msrnn.engine.requests import Event, Request, SamplingParams
from msrnn.engine.scheduler import Counts
from msrnn.errors import UsageError
from tests.helpers.fake_executor import STOP, FakeExecutor, answer_to, next_token


@pytest.fixture
def executor(overlaps: bool) -> FakeExecutor:
    return FakeExecutor(slots=4, overlaps=overlaps)


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


def test_every_answer_reads_its_own_tokens(executor: FakeExecutor) -> None:
    """More prompts than slots, of all lengths: answers that end give their slots to others."""
    given = [text(number, 1 + 5 * number % 17) for number in range(30)]
    lengths = [1 + number * 7 % 11 for number in range(30)]
    engine = Engine(executor, prompt_tokens=6)
    found = engine.generate(given, [params(length) for length in lengths], progress=False)
    assert tokens(*found) == [answer_to(prompt, length) for prompt, length in zip(given, lengths, strict=True)]
    assert max(count for name, count in executor.calls if name == "step") == 4


def test_prompts_are_answered_in_the_order_of_their_arrival(overlaps: bool) -> None:
    engine = Engine(FakeExecutor(1, overlaps))
    requests = [add(engine, text(number, 3)) for number in (3, 1, 2, 0)]
    ended = [event.request for event in run(engine) if event.finish_reason]
    assert ended == requests


def test_an_answer_goes_on_while_a_long_prompt_is_read(executor: FakeExecutor) -> None:
    engine = Engine(executor, prompt_tokens=8)
    short = add(engine, [5, 6], 60)
    run(engine, 3)
    executor.calls.clear()
    long = add(engine, text(1, 200))
    while not long.answers[0].tokens:
        engine.step()
    reads = [0]
    for name, count in executor.calls:
        if name == "step":
            reads.append(0)
        elif name == "read":
            reads[-1] += count
    assert max(reads) == 8, "tokens between two steps"
    assert len(reads) > 200 // 8
    run(engine)
    assert tokens(short, long) == [answer_to([5, 6], 60), answer_to(text(1, 200), 5)]


def test_short_prompts_cannot_starve_a_long_one(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "LONG", 20)
    engine = Engine(executor, prompt_tokens=8)
    long, steps = add(engine, text(1, 160)), 0
    while not long.finished:
        add(engine, text(steps + 2, 3), 1)
        engine.step()
        steps += 1
    assert steps < 4 * 160 // 8 + 20, "it has every fourth turn"


def test_answers_to_one_prompt_need_as_many_slots(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    first, many = add(engine, [5], 6), add(engine, [6], 2, n=4)
    later = add(engine, [7], 2)
    run(engine, 3)
    assert engine.counts == Counts(waiting=2, prefill=0, running=1), "nobody overtakes the one that needs four"
    run(engine)
    assert [answer.tokens for answer in many.answers] == [answer_to([6], 2)] * 4
    assert tokens(first, later) == [answer_to([5], 6), answer_to([7], 2)]
    with pytest.raises(UsageError, match="n=5: the engine has 4 batch slots"):
        engine.request([5], params(n=5))


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

    def failing(state: Any, params: SamplingParams, seed: int, prompt: list[int]) -> Any:
        return make(state, params, seed, prompt) if prompt != [9] else 1 / 0

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


def test_stop_tokens_and_lengths(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    whole = answer_to([5, 6], 8)
    stopped = add(engine, [5, 6], 8, stop_token_ids=[whole[3]])
    none = add(engine, [5, 6], 0)
    run(engine)
    assert (stopped.answers[0].finish_reason, stopped.answers[0].stop_reason) == ("stop", whole[3])
    assert stopped.answers[0].tokens == whole[: whole.index(whole[3])]
    assert (none.answers[0].finish_reason, none.answers[0].tokens) == ("length", [])
    executor.longest = 9
    with pytest.raises(UsageError, match="10 tokens: at most 9"):
        engine.request([5, 6], params(8))


def test_the_models_own_stop_token(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.helpers.fake_executor.next_token", lambda tokens: STOP if len(tokens) == 4 else next_token(tokens)
    )
    engine = Engine(executor)
    ended, ignored = add(engine, [5, 6]), add(engine, [5, 6], ignore_eos=True)
    run(engine)
    assert (ended.answers[0].finish_reason, len(ended.answers[0].tokens)) == ("stop", 2)
    assert (ignored.answers[0].finish_reason, ignored.answers[0].tokens[2]) == ("length", STOP)


def test_a_shared_prefix_is_read_once(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    shared = text(1, 100)
    requests = [add(engine, [*shared, number], 3) for number in (5, 6, 7)]
    run(engine)
    assert tokens(*requests) == [answer_to([*shared, number], 3) for number in (5, 6, 7)]
    assert sum(count for name, count in executor.calls if name == "read") == 100 + 3
    again = add(engine, [*shared, 5], 3)
    executor.calls.clear()
    run(engine)
    assert (tokens(again), again.cached_tokens) == ([answer_to([*shared, 5], 3)], 101)
    assert executor.calls[0] == ("put", 1), "nothing is left to read"


def test_the_log_probabilities_of_a_prompt(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, and from the beginning, whatever is kept."""
    monkeypatch.setattr(prefill_module, "SCORED", 4)
    engine = Engine(executor)
    add(engine, text(1, 40))
    run(engine)
    request = add(engine, text(1, 40), prompt_logprobs=1, logprobs=1)
    run(engine)
    assert [scored is None for scored in request.prompt_logprobs] == [True, *[False] * 39]
    assert [scored.top for scored in request.answers[0].logprobs] == [[(t, 0.0)] for t in answer_to(text(1, 40), 5)]


def conversation(turns: list[list[int]], length: int) -> list[list[int]]:
    """The answers to these turns; a turn that its limit ends has no stop token."""
    read: list[int] = []
    found = []
    for turn in turns:
        read += turn
        found.append(answer_to(read, length))
        read += found[-1]
    return found


@pytest.mark.parametrize("folder", [False, True])
def test_sessions(overlaps: bool, tmp_path: Path, folder: bool) -> None:
    """Turns go on where the last one ended, with other answers beside them; with a folder, after a restart too."""
    turns = [[5, 6, 7], [8], text(1, 30), [9, 9]]
    engine, found = Engine(FakeExecutor(2, overlaps), sessions=tmp_path if folder else None), []
    for number, turn in enumerate(turns):
        if folder and number == 2:
            engine.close()
            engine = Engine(FakeExecutor(2, overlaps), sessions=tmp_path)
        other = add(engine, text(number, 3), 9)
        found.append(add(engine, turn, 4, "talk"))
        run(engine)
        assert tokens(other) == [answer_to(text(number, 3), 9)]
    assert tokens(*found) == conversation(turns, 4)
    assert engine.sessions.turns("talk") == 4
    engine.close()


def test_a_session_has_one_answer_at_a_time(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    first, second = add(engine, [5], 20, "talk"), add(engine, [6], 20, "talk")
    run(engine, 3)
    assert "is answering another request" in str(second.answers[0].error)
    assert engine.stop_session("talk")
    run(engine)
    assert (first.answers[0].finish_reason, engine.sessions.turns("talk")) == ("stop", 1)
    cut = first.answers[0].tokens
    assert cut == answer_to([5], len(cut))
    third = add(engine, [7], 3, "talk")
    run(engine)
    assert tokens(third) == [answer_to([5, *cut, 7], 3)]


def test_a_cancelled_turn_leaves_its_session_as_it_was(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    add(engine, [5], 3, "talk")
    run(engine)
    cancelled = add(engine, [6], 50, "talk")
    run(engine, 4)
    cancelled.cancel()
    run(engine)
    again = add(engine, [8], 3, "talk")
    run(engine)
    assert tokens(again) == [conversation([[5], [8]], 3)[1]]
    assert engine.sessions.turns("talk") == 2


def test_a_session_of_another_model_is_refused(tmp_path: Path) -> None:
    engine = Engine(FakeExecutor(), sessions=tmp_path)
    add(engine, [5], 3, "talk")
    run(engine)
    engine.close()
    other = Engine(FakeExecutor(policy="another"), sessions=tmp_path)
    refused, sound = add(other, [6], 3, "talk"), add(other, [7], 3)
    run(other)
    assert refused.answers[0].error_code == "session_unreadable"
    assert tokens(sound) == [answer_to([7], 3)]


def test_lanes_take_turns_and_convert_sessions(overlaps: bool) -> None:
    short, long = FakeExecutor(4, overlaps), FakeExecutor(1, overlaps, positions="compressed")
    engine = LongEngine(short, long, length=20)
    requests = [add(engine, [5], 10), add(engine, text(1, 30), 10)]
    run(engine, 12)
    steps = [sum(name == "step" for name, _ in each.calls) for each in (short, long)]
    assert abs(steps[0] - steps[1]) <= 1
    run(engine)
    assert tokens(*requests) == [answer_to([5], 10), answer_to(text(1, 30), 10)]
    turns = [[5, 6], text(2, 30), [7]]
    found = []
    for turn in turns:
        found.append(add(engine, turn, 4, "talk"))
        run(engine)
    assert tokens(*found) == conversation(turns, 4)
    assert engine.sessions.infos()[0].positions == "compressed"
    assert engine.long_requests == 3
    engine.close()
    assert (short.closed, long.closed) == (True, True)


def test_retention_is_told_as_often_as_asked(executor: FakeExecutor, overlaps: bool) -> None:
    engine = Engine(executor)
    request = engine.request([5, 6, 7], params(5), retention=2)
    engine.add(request)
    told = [event.retention and event.retention.seen for event in run(engine)]
    assert told == [3 + overlaps, None, 5 + overlaps, None, 7 + overlaps]


def test_streams(overlaps: bool) -> None:
    executor = FakeExecutor(3, overlaps)
    engine = Engine(executor)

    async def consume(seed: int) -> list[int]:
        events = engine.stream(text(seed, 4), params(8))
        return [event.token async for event in events if event.token is not None]

    async def consume_all() -> list[list[int]]:
        return await asyncio.gather(*(consume(seed) for seed in range(9)))

    assert asyncio.run(consume_all()) == [answer_to(text(seed, 4), 8) for seed in range(9)]
    engine.close()
    assert executor.closed


def test_an_engine_does_not_load_torch() -> None:
    """Its executor does, if it needs it."""
    work = "Engine(FakeExecutor()).generate([[5, 6], [7]], progress=False)"
    imports = "import sys; from tests.helpers.fake_executor import FakeExecutor; from msrnn.engine.engine import Engine"
    code = f"{imports}; {work}; import msrnn.engine.lanes; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_an_executor_has_its_own_slots() -> None:
    with pytest.raises(UsageError, match="slots=2: the executor has 4 batch slots already; leave slots out"):
        Engine(FakeExecutor(), slots=2)
    engine = Engine(FakeExecutor(3))
    engine.warm_up()
    assert engine.capacity == 3
