"""Lists of prompts: answers come as they finish, an answer can be continued, and a bar is shown on a terminal."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch

import msrnn
from msrnn.engine.scheduler import Counts
from msrnn.errors import UsageError
from tests.helpers.tiny import build, llama

pytestmark = pytest.mark.usefixtures("overlaps")

SAMPLED = msrnn.SamplingParams(
    temperature=2.0, seed=5, max_tokens=14, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.3
)
PROMPT = [5, 6, 7, 8]


def greedy(tokens: int) -> msrnn.SamplingParams:
    return msrnn.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, 97) for _ in range(draw.randint(1, 20))] for _ in range(count)]


@pytest.fixture
def engine() -> msrnn.Engine:
    return msrnn.Engine.offline(msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9), slots=2)


def test_answers_come_as_they_finish(engine: msrnn.Engine) -> None:
    lengths = [9, 2, 3, 7, 1]
    expected = engine.generate(prompts(5), [greedy(length) for length in lengths])
    found = []
    for index, request in engine.answers(prompts(5), [greedy(length) for length in lengths]):
        assert request.finished
        assert request.answers[0].tokens == expected[index].answers[0].tokens
        assert len(request.answers[0].tokens) == lengths[index]
        found.append(index)
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert found.index(1) < found.index(0), "it is shorter"


def test_an_iterator_that_is_left_cancels_the_rest(engine: msrnn.Engine) -> None:
    other = engine.request([7, 7], greedy(30))
    engine.add(other)
    answers = engine.answers(prompts(6), greedy(5))
    _, first = next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert first.answers[0].finish_reason == "length"
    assert engine.counts == Counts(waiting=0, prefill=0, running=1), "of the request that was there before"
    assert [len(request.answers[0].tokens) for request in engine.generate(prompts(3), greedy(4))] == [4] * 3
    assert len(other.answers[0].tokens) == 30


def test_a_step_that_fails_leaves_nothing_behind(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, left = engine.executor.step, [4]

    def failing(samplers: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(samplers)

    monkeypatch.setattr(engine.executor, "step", failing)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(prompts(6), greedy(8))
    assert engine.idle
    assert len(engine.generate(prompts(6), greedy(8))) == 6


@pytest.mark.parametrize("first", [1, 6, 13])
def test_an_answer_is_continued(engine: msrnn.Engine, first: int) -> None:
    """Its noise and its penalties go on, so the rest is what it would have been."""
    (whole,) = engine.generate([PROMPT], SAMPLED)
    tokens = whole.answers[0].tokens
    rest = msrnn.SamplingParams(**{**vars(SAMPLED), "continued": first, "max_tokens": 14 - first})
    (found,) = engine.generate([[*PROMPT, *tokens[:first]]], rest)
    assert found.answers[0].tokens == tokens[first:]
    assert len(set(tokens)) > 5


def test_what_cannot_be_continued(engine: msrnn.Engine) -> None:
    for continued in (-1, 1.0, True):
        with pytest.raises(UsageError, match=f"continued={continued}: must be a whole number, from 0 to"):
            msrnn.SamplingParams(continued=continued)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="continued=4: must be less than the 4 tokens of the prompt"):
        engine.request(PROMPT, msrnn.SamplingParams(continued=4))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_only(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for stream, progress in ((Terminal(), True), (Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr("sys.stderr", stream)
        engine.generate(prompts(3), greedy(2), progress=progress)
        shown.append(stream.getvalue())
    assert "3/3" in shown[0]
    assert shown[1:] == ["", ""]


def test_ends_are_kept_where_conversations_are_sent_again() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)
    for keep_ends, kept in ((True, 2), (False, 0)):
        engine = msrnn.Engine(rnn, slots=2, keep_ends=keep_ends)
        engine.generate([PROMPT], greedy(3))
        assert len(engine.prefixes) == kept
