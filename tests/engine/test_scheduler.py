"""What the scheduler decides, with an executor that has no model: order, fairness, ends, shared prefixes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from msrnn.engine import prefill as prefill_module
from msrnn.engine.engine import Engine
from msrnn.engine.scheduler import Counts
from msrnn.errors import UsageError
from tests.helpers.fake_executor import STOP, FakeExecutor, answer_to, next_token
from tests.helpers.fake_requests import add, params, run, text, tokens


@pytest.fixture
def executor(overlaps: bool) -> FakeExecutor:
    return FakeExecutor(slots=4, overlaps=overlaps)


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
    assert Engine(FakeExecutor(3)).capacity == 3


def test_a_warm_up_tells_its_parts() -> None:
    executor, told = FakeExecutor(), list[str]()
    engine = Engine(executor, prompt_tokens=2048, guesses=3)
    engine.warm_up(told.append)
    assert executor.calls == [("prompt", 2048), ("step", 1), ("guesses", 4)]
    assert told == ["prompt of 2,048 tokens (1 of 3)", "step of 1 answer (2 of 3)", "guesses of 4 tokens (3 of 3)"]
