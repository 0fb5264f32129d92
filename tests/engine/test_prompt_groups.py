"""Short prompts that are read together: the same answers, in few reads, and none waits long for others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import msrnn
from msrnn.engine import prompt_groups
from msrnn.engine.engine import Engine
from msrnn.engine.local_executor import LocalExecutor, local, require_logits
from msrnn.engine.prefill import Prefill
from msrnn.engine.prompt_groups import PromptGroups
from msrnn.engine.requests import Request
from tests.engine.test_engine import GREEDY, generated, prompts
from tests.helpers.fake_executor import PROTECTED, FakeExecutor, answer_to
from tests.helpers.fake_requests import add, params, run, text, tokens
from tests.helpers.tiny import FAMILIES, build, llama


@pytest.fixture
def executor(overlaps: bool) -> FakeExecutor:
    return FakeExecutor(slots=8, overlaps=overlaps, together=4)


@pytest.fixture
def _waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hundreds of slots."""
    monkeypatch.setattr(prompt_groups, "SLOTS", 1)


def test_prompts_that_arrive_together_are_read_together(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    requests = [add(engine, text(number, 5 + number % 4)) for number in range(9)]
    run(engine)
    assert tokens(*requests) == [answer_to(request.prompt, 5) for request in requests]
    assert executor.groups == [[5, 6, 7, 8], [5, 6, 7, 8]]
    assert [count for name, count in executor.calls if name == "put"] == [1] * 9


def test_only_prompts_of_about_one_length_are_read_together(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    requests = [add(engine, text(number, 30 if number % 2 else 6)) for number in range(16)]
    run(engine)
    assert tokens(*requests) == [answer_to(request.prompt, 5) for request in requests]
    assert sorted(executor.groups) == [[6] * 4, [6] * 4, [30] * 4, [30] * 4]


def test_prompts_that_are_read_alone(executor: FakeExecutor) -> None:
    """Scores of a prompt, protection, a prefix that others share, and length."""
    engine = Engine(executor, prompt_tokens=64)
    alone = [add(engine, text(number, 6), prompt_logprobs=0) for number in range(4)]
    shared = text(0, 40)
    alone += [add(engine, [*shared, number]) for number in range(3, 7)]
    alone += [add(engine, text(number, prompt_groups.LONGEST + 1)) for number in range(4)]
    run(engine)
    assert tokens(*alone) == [answer_to(request.prompt, 5) for request in alone]
    for protect in (3, 6):
        protected = [engine.request(text(number + protect, 6), GREEDY, protect=protect) for number in range(4)]
        for request in protected:
            engine.add(request)
        run(engine)
        expected = [
            [token + PROTECTED for token in one.prompt[:protect]] + [*one.prompt[protect:]] for one in protected
        ]
        assert tokens(*protected) == [answer_to(prompt, 12) for prompt in expected]
    # What follows a prefix that is in the cache, or is protected, may be read with others.
    assert all(set(group) <= {1, 3} for group in executor.groups)


def under_way(engine: Engine, length: int, done: int = 0, stops: list[int] | None = None) -> Prefill:
    request = engine.request(text(length, length))
    state = engine.executor.new_state()
    return Prefill(request, request.prompt, state, done, stops or [length], [(length, None)])


def test_who_joins_a_group(executor: FakeExecutor) -> None:
    engine, groups = Engine(executor), PromptGroups(executor.facts)
    first, request = under_way(engine, 20), engine.request(text(1, 30))
    assert groups.admits(request, [first])
    assert not groups.admits(engine.request(text(1, 40)), [first]), "of another length"
    assert not groups.admits(request, [first, under_way(engine, 600)]), "beside a long prompt no group can form"
    assert not groups.admits(request, [under_way(engine, 20, stops=[5, 20])]), "nor beside one that is read in parts"
    assert not groups.admits(request, [first] * 4)
    rest = under_way(engine, 20, done=17)
    assert groups.choose(rest, [first, rest, first, first], may_wait=False) == [rest]
    assert not groups.admits(request, [first]), "once one is read, those behind have their turn"
    groups.begin()
    assert groups.choose(first, [first] * 4, may_wait=True) == [first] * 4
    groups.limit(64)
    assert groups.choose(first, [first] * 4, may_wait=True) == [first]


def test_a_prefix_that_is_in_the_cache_is_waited_for_no_more(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    prefill = under_way(engine, 60, stops=[40, 60])
    other = engine.request([*prefill.tokens[:40], 5, 6])
    assert prefill.will_serve(other, 42)
    prefill.done = 40
    assert not prefill.will_serve(other, 42)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("_waits")
def test_any_load_gets_its_own_answers(executor: FakeExecutor, seed: int) -> None:
    """Prompts of all lengths and kinds that arrive at any time; some are cancelled."""
    draw, engine = random.Random(seed), Engine(executor, prompt_tokens=256)
    waiting, every, cancelled = list[Request](), list[Request](), list[Request]()
    for number in range(60):
        kind: dict[str, Any] = draw.choice([{}, {}, {}, {"n": 2}, {"prompt_logprobs": 1}])
        asked = msrnn.SamplingParams(temperature=0, max_tokens=draw.randint(1, 20), **kind)
        session = f"chat-{number}" if not kind and draw.random() < 0.2 else None
        length = draw.choice([draw.randint(1, 60), draw.randint(9, 16)])
        waiting.append(engine.request(text(draw.randrange(40), length), asked, session))
    while waiting or not engine.idle:
        for _ in range(min(len(waiting), draw.randint(0, 2))):
            every.append(waiting.pop())
            engine.add(every[-1])
        if every and draw.random() < 0.05:
            cancelled.append(draw.choice(every))
            cancelled[-1].cancel()
        engine.step()
    assert executor.groups
    for request in every:
        expected = answer_to(request.prompt, request.params.max_tokens)
        for answer in request.answers:
            assert answer.error is None
            whole = answer.tokens == expected
            assert whole or (request in cancelled and answer.tokens == expected[: len(answer.tokens)])
    assert [slot for slot in executor.slots if slot is not None] == []


def waits(executor: FakeExecutor, lengths: list[int], count: int = 80) -> list[int]:
    """Steps from the begin of each prompt to the begin of its answer, in an engine that is always full."""
    draw, engine = random.Random(5), Engine(executor, prompt_tokens=64, prefix_bytes=0, prefix_host_bytes=0)
    requests = [add(engine, text(number, draw.choice(lengths)), draw.randint(5, 30)) for number in range(count)]
    begun, answered, step = dict[Request, int](), dict[Request, int](), 0
    while not engine.idle:
        engine.step()
        step += 1
        for request in requests:
            if request.begun is not None:
                begun.setdefault(request, step)
            if request.answers[0].tokens:
                answered.setdefault(request, step)
    assert tokens(*requests) == [answer_to(request.prompt, request.params.max_tokens) for request in requests]
    return [answered[request] - begun[request] for request in requests]


@pytest.mark.usefixtures("_waits")
def test_in_a_full_engine_prompts_wait_for_others_and_not_long(executor: FakeExecutor) -> None:
    found = waits(executor, [5])
    assert sum(map(len, executor.groups)) >= 60
    assert 0 < max(found) <= prompt_groups.MOST_STEPS + 1


@pytest.mark.usefixtures("_waits")
def test_a_long_prompt_among_short_ones(executor: FakeExecutor) -> None:
    found = waits(executor, [5, 6, 5, 6, 600])
    assert executor.groups
    assert max(found) <= prompt_groups.MOST_STEPS + 600 // 64 * 5


@pytest.mark.parametrize(("length", "answers"), [(20, 1), (200, 2)])
@pytest.mark.parametrize("prompt_tokens", [1024, 1100, 1700])
def test_nobody_is_overtaken_for_ever(overlaps: bool, prompt_tokens: int, length: int, answers: int) -> None:
    """Prompts of one length that never end leave one of another length, or one that needs two slots, its turn."""
    for limit in (5, 7, 10, 13):
        executor = FakeExecutor(slots=8, overlaps=overlaps, together=4)
        engine = Engine(executor, prompt_tokens=prompt_tokens, prefix_bytes=0, prefix_host_bytes=0)
        other, number = engine.request(text(3, length), params(3, n=answers)), 0
        for step in range(120):
            while len(engine.queue.waiting) < 6:
                number += 1
                add(engine, [2 + number % 90, *text(number, 199)], limit)
            if step == 30:
                engine.add(other)
            engine.step()
        assert other.begun is not None


@pytest.mark.parametrize("length", [30, 500])
def test_a_group_has_no_more_tokens_than_are_read_between_two_steps(executor: FakeExecutor, length: int) -> None:
    engine = Engine(executor, prompt_tokens=128)
    running = add(engine, [5, 6], 100)
    run(engine, 3)
    executor.calls.clear()
    requests = [add(engine, text(number, length)) for number in range(4)]
    run(engine)
    reads = [0]
    for name, count in executor.calls:
        reads = [*reads, 0] if name == "step" else reads
        reads[-1] += count if name == "read" else 0
    assert max(reads) <= 128
    assert executor.groups == ([[30] * 4] if length == 30 else [])
    assert tokens(running, *requests[:1]) == [answer_to([5, 6], 100), answer_to(text(0, length), 5)]


@pytest.mark.usefixtures("_waits")
def test_a_long_prompt_goes_on_while_a_short_one_is_there(executor: FakeExecutor) -> None:
    """No group can form beside it, so nobody waits for one."""
    engine = Engine(executor, prompt_tokens=64, prefix_bytes=0, prefix_host_bytes=0)
    running = [add(engine, text(number, 3), 200) for number in range(6)]
    run(engine, 8)
    add(engine, text(1, 3000), 2)
    run(engine, 3)
    for number in range(4):
        add(engine, text(number, 8), 2)
    executor.calls.clear()
    run(engine, 20)
    names = [name for name, _ in executor.calls]
    assert names.count("step") == 20
    assert all("read" in names[at : at + 3] for at in range(0, len(names) - 3))
    assert len(running) == 6


def test_turns_of_sessions_are_read_together(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    for turn in range(2):
        requests = [add(engine, text(number + turn, 20), 5, session=f"chat-{number}") for number in range(4)]
        run(engine)
        assert not any(request.answers[0].error for request in requests)
    assert [len(group) for group in executor.groups] == [4, 4]


def test_with_few_slots_no_prompt_waits(executor: FakeExecutor) -> None:
    assert max(waits(executor, [5])) <= 1
    assert sum(map(len, executor.groups)) < 30


@pytest.mark.usefixtures("_waits")
def test_the_last_prompts_do_not_wait(executor: FakeExecutor) -> None:
    """Nobody else is there to be waited for."""
    engine = Engine(executor)
    add(engine, [5, 6], 50)
    run(engine, 3)
    request = add(engine, [7, 8], 1)
    run(engine, 2)
    assert request.finished


@pytest.mark.usefixtures("_waits")
def test_a_cancelled_prompt_leaves_its_group(executor: FakeExecutor) -> None:
    engine = Engine(executor, prefix_bytes=0, prefix_host_bytes=0)
    running = [add(engine, text(number, 3), 10 + 20 * number) for number in range(8)]
    while min(len(request.answers[0].tokens) for request in running) < 2:
        engine.step()
    later = [add(engine, text(number, 6), 4) for number in range(9, 13)]
    while not engine.counts.prefill:
        engine.step()
    later[0].cancel()
    run(engine)
    assert later[0].answers[0].finish_reason == "cancelled"
    assert tokens(*later[1:]) == [answer_to(request.prompt, 4) for request in later[1:]]


def test_a_text_that_just_fits_does_so_beside_a_longer_part() -> None:
    """A state of many columns and a part of many: no sequence has both."""
    rnn = msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)
    executor = LocalExecutor(rnn, slots=4, together=2)
    states = [executor.new_state(), executor.new_state()]
    executor.read(states[0], text(1, 30))
    checked: list[int] = []
    object.__setattr__(rnn.spec, "check_gaps", checked.append)
    executor.read_together(states, [text(2, 5), text(3, 20)])
    assert checked == [35]
    assert [state.state.columns for state in states] == [35, 20]


OPTIONS: dict[str, dict[str, Any]] = {
    "tova": {},
    "echo": {"policy": "echo"},
    "h2o": {"policy": "h2o"},
    "head": {"policy": "tova-head"},
    "budget": {"policy": "echo", "size": "9:upper"},
    "compressed": {"positions": "compressed"},
    "int8": {"state_dtype": "int8"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_states_that_are_read_together_are_those_that_are_read_alone(case: str, device: str) -> None:
    """After texts of their own, with protected tokens and sizes of their own."""
    options: dict[str, Any] = {"policy": "tova", "size": 9}
    rnn = msrnn.MultiStateRNN(build(llama(), device), **(options | OPTIONS[case]))
    executor, sizes = LocalExecutor(rnn, slots=4, together=4), [None, None if "budget" in case else 6, None]
    before, parts = [[], text(1, 7), text(2, 20)], [text(3, 16), text(4, 3), text(5, 30)]
    for _ in range(2):  # the second time, the batch has other rows in it
        results = []
        for together in (True, False):
            states = [executor.new_state(size) for size in sizes]
            for number, (state, ids) in enumerate(zip(states, before, strict=True)):
                if ids:
                    executor.read(state, ids[:2], protect=number == 2)
                    executor.read(state, ids[2:])
            if together:
                executor.read_together(states, parts)
            else:
                for state, part in zip(states, parts, strict=True):
                    executor.read(state, part)
            results.append(states)
        for mine, other in zip(*results, strict=True):
            assert (mine.seen, mine.state.columns, mine.state.whole) == (other.seen, other.state.columns, True)
            assert executor.retention(mine).list_shares() == executor.retention(other).list_shares()
            torch.testing.assert_close(require_logits(mine), require_logits(other), atol=2e-4, rtol=2e-4)
            step = torch.tensor([[5]], device=device)
            theirs = rnn.step(step, local(other).state)
            torch.testing.assert_close(rnn.step(step, local(mine).state), theirs, atol=2e-4, rtol=2e-4)
        before, parts = parts, [*before[1:], text(6, 40)]


@pytest.mark.parametrize("family", ["qwen2", "mistral-sliding", "gemma2"])
def test_answers_are_those_of_generate(family: str, overlaps: bool, device: str) -> None:
    rnn = msrnn.MultiStateRNN(build(FAMILIES[family](), device), "echo", 9)
    executor = LocalExecutor(rnn, slots=6, together=3)
    found, read = [], executor.read_together

    def count(states: Any, tokens: Any) -> None:
        found.append(len(states))
        read(states, tokens)

    executor.read_together = count  # type: ignore[method-assign]
    engine = msrnn.Engine(executor, prefix_bytes=0, prefix_host_bytes=0)
    answers = engine.generate(prompts(14), GREEDY, progress=False)
    assert [request.answers[0].tokens for request in answers] == [generated(rnn, prompt) for prompt in prompts(14)]
    assert found
    assert set(found) == {3}
