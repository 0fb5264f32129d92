"""Guessed tokens: the same answers, in fewer passes, and states that have read no wrong guess."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import msrnn
from msrnn.engine.guesses import LONGEST_PAUSE, TextGuesser
from msrnn.engine.running_answer import RunningAnswer
from msrnn.errors import UsageError
from tests.helpers.fake_executor import STOP, FakeExecutor, answer_to
from tests.helpers.fake_requests import add, params, run, text, tokens
from tests.helpers.tiny import build, llama


def test_what_has_followed_before_is_guessed() -> None:
    guesser = TextGuesser([5, 6, 7, 8, 9, 10, 11, 12, 13, 5, 6, 7], most=8)
    assert guesser.guess(8) == [8, 9, 10]
    assert guesser.guess(2) == [8, 9]
    guesser.learn(3, 3)
    assert guesser.guess(8) == [8, 9, 10, 11, 12, 13, 5]
    assert guesser.guess(4) == [8, 9, 10, 11]
    guesser.learn(7, 3)
    assert guesser.guess(8) == [8, 9, 10]
    guesser.add(40)
    assert guesser.guess(8) == [], "never seen"
    assert TextGuesser([1, 2], most=4).guess(4) == []


def test_the_newest_place_counts() -> None:
    assert TextGuesser([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], most=4).guess(1) == [5]


def test_wrong_guesses_bring_longer_and_longer_pauses() -> None:
    guesser, pauses, numbers = TextGuesser([1, 2, 3] * 4, most=4), list[int](), itertools.cycle([1, 2, 3])
    for _ in range(9):
        guesser.learn(2, 0)
        count = 0
        while not guesser.guess(1):
            guesser.add(next(numbers))
            count += 1
        pauses.append(count)
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes answers guess their true next tokens, of which it replaces one in `one_in` by a wrong one."""

    def guess_well(one_in: int) -> None:
        draw = random.Random(one_in)

        def guess(self: RunningAnswer) -> list[int]:
            most = self.request.params.max_tokens - len(self.answer.tokens) - 1
            true = answer_to([*self.request.prompt, *self.answer.tokens], max(0, min(most, draw.randint(0, 6))))
            return [token if draw.randrange(one_in) else 2 + (token - 1) % 90 for token in true]

        monkeypatch.setattr(RunningAnswer, "guess", guess)

    return guess_well


@pytest.mark.parametrize("one_in", [1, 2, 5, 1000])
def test_the_scheduler_keeps_what_is_right(oracle: Callable[[int], None], one_in: int, overlaps: bool) -> None:
    """Alone at first, then beside others that arrive, with sessions that go on."""
    oracle(one_in)
    executor = FakeExecutor(slots=3, overlaps=overlaps)
    engine = msrnn.Engine(executor, prompt_tokens=6, guesses=6)
    first = add(engine, text(1, 9), 40)
    run(engine, 12)
    others = [add(engine, text(number, 4 + number), 10) for number in range(2, 7)]
    run(engine)
    assert tokens(first) == [answer_to(text(1, 9), 40)]
    assert tokens(*others) == [answer_to(text(number, 4 + number), 10) for number in range(2, 7)]
    said = list[int]()
    for turn in range(3):
        request = engine.request(text(turn, 5), params(11), session="chat")
        engine.add(request)
        run(engine)
        said += text(turn, 5)
        assert request.answers[0].tokens == answer_to(said, 11)
        said += request.answers[0].tokens
    verified = [count for name, count in executor.calls if name == "verify"]
    assert verified
    assert max(verified) <= 6


@pytest.mark.parametrize("stop_after", range(1, 12))
def test_an_answer_that_ends_among_right_guesses(
    oracle: Callable[[int], None], stop_after: int, overlaps: bool
) -> None:
    """What was read after its end is taken back, so its session continues from the end."""
    oracle(1000)
    prompt = text(3, 8)
    expected = answer_to(prompt, 12)[:stop_after]
    stops = expected[-1]
    expected = expected[: expected.index(stops)]
    engine = msrnn.Engine(FakeExecutor(slots=2, overlaps=overlaps), guesses=6)
    request = engine.request(prompt, params(40, stop_token_ids=[stops]), session="chat")
    engine.add(request)
    run(engine)
    assert request.answers[0].tokens == expected
    follows = engine.request([7, 7], params(9), session="chat")
    engine.add(follows)
    run(engine)
    assert follows.answers[0].tokens == answer_to([*prompt, *expected, stops, 7, 7], 9)


def test_a_request_that_is_cancelled_or_wants_retention(oracle: Callable[[int], None], overlaps: bool) -> None:
    oracle(1000)
    executor = FakeExecutor(slots=2, overlaps=overlaps)
    engine = msrnn.Engine(executor, guesses=6)
    cancelled = add(engine, text(1, 5), 50)
    run(engine, 4)
    cancelled.cancel()
    run(engine)
    assert cancelled.answers[0].finish_reason == "cancelled"
    executor.calls.clear()
    shown = engine.request(text(2, 5), params(9), retention=2)
    engine.add(shown)
    run(engine)
    assert shown.answers[0].tokens == answer_to(text(2, 5), 9)
    assert "verify" not in {name for name, _ in executor.calls}


# With a model


PROMPT = [7, 8, 9, 10, 11, 12, 13, 14] * 6
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_k": 20, "seed": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "log probabilities": {"temperature": 0, "logprobs": 2},
    "stop token": {"temperature": 0, "stop_token_ids": [11]},
    "bias": {"temperature": 0, "logit_bias": {20: 3.0}, "min_tokens": 6},
}


class Widths:
    """How many tokens each forward pass reads."""

    def __init__(self, rnn: msrnn.MultiStateRNN) -> None:
        self.found: list[int] = []
        rnn.model.get_input_embeddings().register_forward_pre_hook(self)

    def __call__(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self.found.append(inputs[0].shape[1])


@pytest.mark.parametrize("policy", ["tova", "echo"])
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_answers_are_the_same(policy: str, how: dict[str, Any], device: str) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(eos_token_id=None), device), policy, 12)
    settings = msrnn.SamplingParams(max_tokens=60, **how)
    (expected,) = msrnn.Engine(rnn, slots=2).generate([PROMPT], settings, progress=False)
    engine, widths = msrnn.Engine(rnn, slots=2, guesses=6), Widths(rnn)
    (found,) = engine.generate([PROMPT], settings, progress=False)
    assert found.answers[0].tokens == expected.answers[0].tokens
    assert found.answers[0].finish_reason == expected.answers[0].finish_reason
    for mine, theirs in zip(found.answers[0].logprobs, expected.answers[0].logprobs, strict=True):
        assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-4)
    if policy == "tova" and how in (WAYS["greedy"], WAYS["log probabilities"]):
        assert max(widths.found[1:]) > 1, "nothing was guessed"


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_guesses_that_are_mostly_right_change_no_answer(
    how: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an answer is drawn by: most tokens come from passes with guesses, one in four of which is wrong."""
    rnn = msrnn.MultiStateRNN(build(llama(eos_token_id=None), device), "echo", 12)
    settings = msrnn.SamplingParams(max_tokens=40, **how)
    (request,) = msrnn.Engine(rnn, slots=2).generate([PROMPT], settings, progress=False)
    expected = request.answers[0].tokens

    def guess(self: RunningAnswer) -> list[int]:
        done = len(self.answer.tokens)
        coming = [*enumerate(expected)][done : min(done + 5, settings.max_tokens - 1)]
        return [(token + 1) % 90 if at % 4 == 3 else token for at, token in coming]

    monkeypatch.setattr(RunningAnswer, "guess", guess)
    (found,) = msrnn.Engine(rnn, slots=2, guesses=6).generate([PROMPT], settings, progress=False)
    assert found.answers[0].tokens == expected


def test_a_session_goes_on_from_what_was_right(device: str) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(eos_token_id=None), device), "echo", 12)
    answers = []
    for guesses in (0, 6):
        engine = msrnn.Engine(rnn, slots=2, guesses=guesses)
        said = []
        for turn in range(3):
            request = engine.request(PROMPT[turn:], msrnn.SamplingParams(temperature=0, max_tokens=30), session="chat")
            engine.add(request)
            while not engine.idle:
                engine.step()
            said.append(request.answers[0].tokens)
        answers.append(said)
    assert answers[0] == answers[1]


def test_what_cannot_be_taken_back_is_refused() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 12, recall=4)
    with pytest.raises(UsageError, match="guesses=4"):
        msrnn.Engine(rnn, slots=2, guesses=4)
    with pytest.raises(UsageError, match="guesses=-1"):
        msrnn.Engine(FakeExecutor(), guesses=-1)
    assert STOP not in answer_to([5], 50)
