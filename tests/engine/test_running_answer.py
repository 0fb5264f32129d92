from __future__ import annotations

from typing import Any

import pytest

from msrnn.engine.executor import FAILED, NOT_FINITE
from msrnn.engine.requests import NOT_FINITE_ERROR, Event, Logprobs, Request, SamplingParams
from msrnn.engine.running_answer import Added, RunningAnswer, seed_of
from tests.helpers.characters import character_tokenizer

OWN_STOP = 2
SCORED = Logprobs(-0.5, [(5, -0.5)])


def start(prompt: list[int] | None = None, tokenizer: Any = None, retention: int = 0, **params: Any) -> RunningAnswer:
    request = Request(prompt or [5, 6], SamplingParams(**params), retention=retention)
    stops = frozenset({OWN_STOP, *request.params.stop_token_ids})
    return RunningAnswer(request, 0, request.prompt, 0, tokenizer, stops, object())


def test_each_answer_has_a_seed_of_its_own() -> None:
    one, other = (Request([5], SamplingParams(n=4, seed=seed)) for seed in (3, 4))
    assert seed_of(one, 0) == 3
    assert len({seed_of(request, number) for request in (one, other) for number in range(4)}) == 8
    assert [seed_of(one, number) for number in range(4)] == [seed_of(one, number) for number in range(4)]


def test_an_answer_ends_at_its_length() -> None:
    running = start(max_tokens=2)
    assert running.add(7, SCORED) == Added(7, "", SCORED, None)
    assert running.add(8, None) == Added(8, "", None, "length")
    assert (running.answer.tokens, running.answer.logprobs) == ([7, 8], [SCORED])


@pytest.mark.parametrize(("token", "reason"), [(OWN_STOP, None), (9, 9)])
def test_a_stop_token_ends_the_answer_and_is_not_in_it(token: int, reason: int | None) -> None:
    running = start(stop_token_ids=[9])
    running.add(7, None)
    assert running.add(token, SCORED) == Added(None, "", None, "stop")
    answer = running.answer
    assert (answer.tokens, answer.stop_reason, answer.ending) == ([7], reason, (token, SCORED))
    assert (running.unread, running.last) == ([7, token], token)  # it belongs to the conversation


def test_the_tokens_that_a_slot_has_read() -> None:
    running = start([5, 6])
    assert running.last == 6
    for token in (7, 8):
        running.add(token, None)
    running.reads = 1
    assert (running.read, running.unread, running.last) == ([5, 6, 7], [8], 8)


@pytest.mark.parametrize("token", [NOT_FINITE, FAILED])
def test_a_token_that_is_none(token: int) -> None:
    running = start()
    assert running.add(token, None) == Added(None, "", None, "error")
    assert (running.answer.error == NOT_FINITE_ERROR) is (token == NOT_FINITE)
    assert running.answer.tokens == []


def test_a_stop_string_ends_the_text_before_it() -> None:
    tokenizer = character_tokenizer()
    running = start(tokenizer=tokenizer, stop=["ll"])
    added = [running.add(token, None) for token in tokenizer.encode("hello", add_special_tokens=False)[:4]]
    assert [one.finish_reason for one in added] == [None, None, None, "stop"]
    event = running.finish(Event(running.request, 0, *added[-1]))
    assert (running.answer.text, running.answer.stop_reason, event.finish_reason) == ("he", "ll", "stop")


def test_text_that_was_held_back_comes_with_the_last_event() -> None:
    """The first letter of a stop string, which does not come."""
    tokenizer = character_tokenizer()
    running = start(tokenizer=tokenizer, stop=["lx"], max_tokens=3)
    added = [running.add(token, None) for token in tokenizer.encode("hel", add_special_tokens=False)]
    assert "".join(one.text for one in added) == "he"
    assert running.finish(Event(running.request, 0, *added[-1])).text == "l"
    assert (running.answer.text, running.answer.finish_reason) == ("hel", "length")


def test_an_error_does_not_show_a_prompt() -> None:
    running = start(tokenizer=character_tokenizer())
    assert running.fail(ValueError("of a prompt")).finish_reason == "error"
    assert running.answer.error == "internal error (ValueError)"
    assert running.finish(Event(running.request, 0, None, "", None, "error")).text == ""


@pytest.mark.parametrize(
    ("stopped", "cancelled", "tokens", "reason"),
    [
        (False, False, 1, None),
        (True, False, 1, "stop"),
        (True, False, 0, "cancelled"),
        (True, True, 1, "cancelled"),
        (False, True, 0, "cancelled"),
    ],
)
def test_the_end_that_a_client_asks_for(stopped: bool, cancelled: bool, tokens: int, reason: str | None) -> None:
    running = start()
    for token in range(tokens):
        running.add(7 + token, None)
    if stopped:
        running.request.stop()
    if cancelled:
        running.request.cancel()
    assert running.ended_by_client == reason


def test_which_events_have_the_retention() -> None:
    found = []
    running = start(retention=3)
    for token in range(10, 18):
        running.add(token, None)
        found.append(running.wants_retention(ends=token == 17))
    assert found == [True, False, False, True, False, False, True, True]
    assert not start().wants_retention(ends=True)
