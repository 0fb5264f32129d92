"""Protected prompts in the engine: which tokens are protected, whose cached prefixes fit, and what a session keeps."""

from __future__ import annotations

from typing import Any

import pytest

import msrnn
from msrnn.engine.engine import Engine
from msrnn.engine.requests import Request, SamplingParams
from tests.helpers.fake_executor import PROTECTED, FakeExecutor, answer_to
from tests.helpers.tiny import build, llama, tokens

FIVE = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
PROMPT = [*range(10, 60)]


def ask(engine: Engine, prompt: list[int], **options: object) -> Request:
    request = engine.request(prompt, FIVE, **options)  # type: ignore[arg-type]
    engine.add(request)
    while not request.finished:
        engine.step()
    return request


def expected(prompt: list[int], protect: int) -> list[int]:
    """The fake executor's answers depend on what is protected."""
    return answer_to([token + PROTECTED * (place < protect) for place, token in enumerate(prompt)], 5)


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def engine(executor: FakeExecutor) -> Engine:
    return Engine(executor, prompt_tokens=16, prefix_bytes=2**20)


@pytest.mark.parametrize(("protect", "count"), [("none", 0), ("prompt", 50), (0, 0), (7, 7), (16, 16), (33, 33)])
def test_the_first_tokens_are_protected(protect: int | str, count: int, engine: Engine) -> None:
    assert ask(engine, PROMPT, protect=protect).answers[0].tokens == expected(PROMPT, count)


def test_a_cached_prefix_must_protect_the_same_tokens(engine: Engine) -> None:
    """Each prompt is asked for twice: with what is cached of all others, and with its own state."""
    longer = [*PROMPT, *range(60, 90)]
    for _ in range(2):
        for prompt in (PROMPT, longer):
            for protect in (0, 40, len(prompt)):
                assert ask(engine, prompt, protect=protect).answers[0].tokens == expected(prompt, protect)
    assert ask(engine, longer, protect=40).cached_tokens == len(longer)
    other = [*longer[:70], 5]
    assert ask(engine, other, protect=40).cached_tokens >= 50, "a prefix with the same protected tokens serves it"
    assert ask(engine, other, protect=41).cached_tokens == 0


def test_waiting_prompts_are_served_by_equal_ones_only(engine: Engine) -> None:
    requests = [engine.request(PROMPT, FIVE, protect=protect) for protect in (0, "prompt", 0, "prompt", 20)]
    for request in requests:
        engine.add(request)
    while not all(request.finished for request in requests):
        engine.step()
    counts = [0, 50, 0, 50, 20]
    assert [r.answers[0].tokens for r in requests] == [expected(PROMPT, count) for count in counts]


def test_a_turn_releases_the_one_before(engine: Engine) -> None:
    first = ask(engine, [20, 21, 22], session="s", protect="prompt").answers[0].tokens
    assert first == expected([20, 21, 22], 3)
    text = [20, 21, 22, *first]
    second = ask(engine, [30, 31], session="s", protect="prompt").answers[0].tokens
    assert second == answer_to([*text, 30 + PROTECTED, 31 + PROTECTED], 5)


def test_a_turn_may_keep_what_was_protected(engine: Engine) -> None:
    first = ask(engine, [20, 21, 22], session="s", protect=2).answers[0].tokens
    read = [20 + PROTECTED, 21 + PROTECTED, 22, *first]
    second = ask(engine, [30, 31], session="s", keeps_protected=True).answers[0].tokens
    assert second == answer_to([*read, 30, 31], 5)


def test_too_many_are_refused_before_anything_is_read(engine: Engine, executor: FakeExecutor) -> None:
    executor.protectable = 10
    with pytest.raises(ValueError, match="50 tokens, 10 fit"):
        engine.request(PROMPT, FIVE, protect="prompt")
    for wrong in (-1, 51, True, 1.5, "system"):
        with pytest.raises(ValueError, match="protect"):
            engine.request(PROMPT, FIVE, protect=wrong)  # type: ignore[arg-type]
    assert executor.calls == []


def test_a_session_counts_what_it_has_protected_already(engine: Engine, executor: FakeExecutor) -> None:
    executor.protectable = 5
    ask(engine, [20, 21, 22], session="s", protect="prompt")
    failed = ask(engine, [30, 31, 32], session="s", protect="prompt", keeps_protected=True).answers[0]
    assert failed.error is not None
    assert "3 tokens, 2 fit" in failed.error
    assert ask(engine, [30, 31, 32], session="s", protect="prompt").answers[0].error is None


def test_an_engine_answers_as_generate_does() -> None:
    """A real model: the protected prompt travels through prefill, prefix cache and decode batch."""
    rnn = msrnn.MultiStateRNN(build(llama()), "window", 24)
    engine = Engine(rnn, slots=2, prompt_tokens=7, prefix_bytes=2**24)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    ids = tokens(1, 15)
    for protect in ("prompt", "none", "prompt", "none"):  # the second time from the prefix cache
        how: dict[str, Any] = {"protect": protect, "max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
        alone = rnn.generate(ids, eos_token_id=None, **how)[0, 15:].tolist()
        request = engine.request(ids[0].tolist(), params, protect=protect)
        engine.add(request)
        while not engine.idle:
            engine.step()
        assert request.answers[0].tokens == alone
    with pytest.raises(ValueError, match="24 tokens: 23 fit"):
        engine.request(tokens(1, 24)[0].tolist(), params, protect="prompt")
