"""`min_tokens`: an answer does not end before, and is otherwise what it would have been."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import msrnn
from msrnn.engine.lanes import LongEngine
from msrnn.engine.requests import Request
from msrnn.errors import UsageError
from tests.helpers.characters import END, character_model, character_tokenizer
from tests.helpers.tiny import build, llama

pytestmark = pytest.mark.usefixtures("overlaps")

PROMPT, VOCABULARY = [5, 6, 7], 64
STOP = 9
EAGER: dict[str, Any] = {"logit_bias": {STOP: 100}, "stop_token_ids": [STOP]}  # stops as soon as it may


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(vocab_size=VOCABULARY, eos_token_id=3), "cpu"), "tova", 9)


def params(**more: Any) -> msrnn.SamplingParams:
    return msrnn.SamplingParams(**{"temperature": 0, "max_tokens": 12, **more})


def answer(engine: msrnn.Engine, prompt: Sequence[int] = PROMPT, session: str | None = None, **more: Any) -> Request:
    request = engine.request(prompt, params(**more), session)
    engine.add(request)
    while not engine.idle:
        engine.step()
    assert request.answers[0].error is None
    return request


def by_hand(rnn: msrnn.MultiStateRNN, prompt: Sequence[int], count: int, stops: set[int]) -> list[int]:
    """The most likely tokens but the stop tokens."""
    state, found = rnn.state(), list[int]()
    logits = rnn.read(torch.tensor([prompt]), state, last_only=True)[0, -1]
    while len(found) < count:
        found.append(int(logits.index_fill(0, torch.tensor(sorted(stops)), -torch.inf).argmax()))
        logits = rnn.step(torch.tensor([[found[-1]]]), state)[0, -1]
    return found


@pytest.mark.parametrize("least", [0, 1, 2, 7, 12])
def test_no_stop_token_comes_before(rnn: msrnn.MultiStateRNN, least: int) -> None:
    request = answer(msrnn.Engine(rnn, slots=2), min_tokens=least, **EAGER)
    assert request.answers[0].tokens == by_hand(rnn, PROMPT, least, {STOP, 3})
    assert request.answers[0].finish_reason == ("length" if least == 12 else "stop")


def test_the_models_own_stop_tokens_are_masked_unless_they_are_no_stops(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    own: dict[str, Any] = {"logit_bias": {3: 100}}
    assert answer(engine, **own).answers[0].tokens == []
    assert answer(engine, min_tokens=5, **own).answers[0].tokens == by_hand(rnn, PROMPT, 5, {3})
    assert answer(engine, min_tokens=5, ignore_eos=True, **own).answers[0].tokens == [3] * 12


def test_every_answer_of_a_request_and_no_other(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=8)
    ways: list[dict[str, Any]] = [{"n": 3, "min_tokens": 6, "temperature": 1}, {}, {"min_tokens": 2}]
    requests = [engine.request(PROMPT, params(**EAGER, **way)) for way in ways]
    for request in requests:
        engine.add(request)
    while not engine.idle:
        engine.step()
    assert [[len(one.tokens) for one in request.answers] for request in requests] == [[6, 6, 6], [0], [2]]
    assert len({tuple(one.tokens) for one in requests[0].answers}) == 3


def test_log_probabilities_are_the_models_own(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    masked = answer(engine, min_tokens=4, logprobs=20, **EAGER).answers[0]
    scored = answer(engine, [*PROMPT, *masked.tokens], max_tokens=0, prompt_logprobs=20).prompt_logprobs[len(PROMPT) :]
    for mine, theirs in zip(masked.logprobs, scored, strict=True):
        assert theirs is not None
        assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-5)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    assert masked.ending is not None


def test_tokens_of_an_answer_that_is_continued_do_not_count(rnn: msrnn.MultiStateRNN) -> None:
    """As for `max_tokens`: both are of what is generated."""
    engine = msrnn.Engine(rnn, slots=2)
    whole = answer(engine, min_tokens=8, temperature=1, seed=4, **EAGER).answers[0].tokens
    rest: dict[str, Any] = {"min_tokens": 5, "max_tokens": 9, "continued": 3, "temperature": 1, "seed": 4}
    assert answer(engine, [*PROMPT, *whole[:3]], **rest, **EAGER).answers[0].tokens == whole[3:]
    assert len(whole) == 8


def test_a_session_goes_on_after_it(rnn: msrnn.MultiStateRNN) -> None:
    engine, read = msrnn.Engine(rnn, slots=2), list[int]()
    for least in (4, 0, 6):
        found = answer(engine, PROMPT, "ann", min_tokens=least, **EAGER).answers[0].tokens
        read += PROMPT
        assert found == by_hand(rnn, read, least, {STOP, 3})
        read += [*found, STOP]


def test_the_lane_of_long_texts(rnn: msrnn.MultiStateRNN) -> None:
    longer = msrnn.MultiStateRNN(rnn.model, "tova+1~36", 9, positions="compressed")
    engine = LongEngine(rnn, longer, 8, slots=4)
    assert answer(engine, [*range(10, 30)], min_tokens=5, **EAGER).answers[0].tokens == by_hand(
        longer, [*range(10, 30)], 5, {STOP, 3}
    )


def test_a_stop_string_does_not_end_the_answer_before() -> None:
    tokenizer = character_tokenizer()
    engine = msrnn.Engine(msrnn.MultiStateRNN(character_model(), "tova", 9), slots=2, tokenizer=tokenizer)
    (letter,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    only: Any = {"logit_bias": {letter: 100, END: -100}}
    for stop, least, text in (
        ("a", 0, ""),
        ("a", 1, ""),
        ("a", 5, "aaaa"),
        ("aa", 5, "aaa"),
        ("aaa", 5, "aa"),
        ("aaa", 12, "aaaaaaaaa"),
        ("b", 5, "a" * 12),
    ):
        found = answer(engine, min_tokens=least, stop=[stop], **only).answers[0]
        assert found.text == text, (stop, least)
        assert len(found.tokens) >= least
        assert found.stop_reason == (None if stop == "b" else stop)


def test_nothing_but_stop_tokens() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(vocab_size=VOCABULARY, eos_token_id=3), "cpu"), "tova", 9)
    engine, every = msrnn.Engine(rnn, slots=1), [token for token in range(VOCABULARY) if token != 3]
    with pytest.raises(UsageError, match="min_tokens=1: every token is a stop token; give fewer stop_token_ids"):
        engine.request(PROMPT, params(min_tokens=1, stop_token_ids=every))
    engine.request(PROMPT, params(stop_token_ids=every))
    engine.request(PROMPT, params(min_tokens=1, stop_token_ids=every, ignore_eos=True))
