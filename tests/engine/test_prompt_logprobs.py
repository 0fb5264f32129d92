"""Log probabilities of a prompt's own tokens: those of `rnn.read`, however the prompt is read."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import msrnn
from msrnn.engine import prefill, prompt_logprobs
from msrnn.engine.requests import Request
from msrnn.engine.scheduler import Counts
from msrnn.errors import UsageError
from tests.helpers.tiny import build, llama

pytestmark = pytest.mark.usefixtures("overlaps")

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(3, 97) for _ in range(length)] for length in (1, 2, 23, 70, 150)]


@pytest.fixture
def rnn(device: str) -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), device), "tova", 9)


def params(**changes: Any) -> msrnn.SamplingParams:
    return msrnn.SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **changes})


def check(rnn: msrnn.MultiStateRNN, request: Request, most: int) -> None:
    """The log probabilities of a request are those of one plain read."""
    ids = torch.tensor([request.prompt], device=rnn.device)
    every = rnn.read(ids, rnn.state())[0].float().log_softmax(-1).cpu()
    first, *rest = request.prompt_logprobs
    assert first is None
    assert len(rest) == len(request.prompt) - 1
    for row, token, found in zip(every, request.prompt[1:], rest, strict=False):
        assert found is not None
        assert found.chosen == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in found.top] == pytest.approx(row.topk(most).values.tolist(), abs=1e-4)
        for top, value in found.top:
            assert value == pytest.approx(float(row[top]), abs=1e-4)


@pytest.mark.parametrize(("read", "scored", "most"), [(512, 64, 3), (16, 5, 0), (1, 1, 1)])
def test_they_are_those_of_one_read(
    rnn: msrnn.MultiStateRNN, read: int, scored: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "SCORED", read)
    monkeypatch.setattr(prompt_logprobs, "SCORED", scored)
    plain = msrnn.Engine(rnn, slots=3, prompt_tokens=32).generate(PROMPTS, params())
    found = msrnn.Engine(rnn, slots=3, prompt_tokens=32).generate(PROMPTS, params(prompt_logprobs=most, n=2))
    for request, other in zip(found, plain, strict=True):
        check(rnn, request, most)
        assert [answer.tokens for answer in request.answers] == [other.answers[0].tokens] * 2
    assert all(request.prompt_logprobs == [] for request in plain)


def test_a_kept_state_is_not_used_but_one_is_kept(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=3)
    engine.generate([PROMPTS[3]], params())
    (scored,) = engine.generate([PROMPTS[3]], params(prompt_logprobs=1))
    assert scored.cached_tokens == 0
    check(rnn, scored, 1)
    other = [*PROMPTS[4], 5, 6]
    engine.generate([PROMPTS[4]], params(prompt_logprobs=0))
    (after,) = engine.generate([other], params())
    assert after.cached_tokens == len(PROMPTS[4])
    (alone,) = msrnn.Engine(rnn, slots=3, prefix_bytes=0, prefix_host_bytes=0).generate([other], params())
    assert after.answers[0].tokens == alone.answers[0].tokens


def test_nothing_is_generated_for_no_tokens(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    found = engine.generate(PROMPTS, params(max_tokens=0, prompt_logprobs=2, n=2))
    for request in found:
        check(rnn, request, 2)
        assert [(answer.tokens, answer.finish_reason) for answer in request.answers] == [([], "length")] * 2
    assert engine.counts == Counts(waiting=0, prefill=0, running=0)
    assert not engine.under_way


def test_numbers_that_are_not_finite_fail_the_request_alone(
    rnn: msrnn.MultiStateRNN, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, read = msrnn.Engine(rnn, slots=3, prefix_bytes=0, prefix_host_bytes=0), rnn.read

    def spoiled(ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        logits = read(ids, *args, **options)
        return logits.fill_(float("nan")) if ids.shape[1] == len(PROMPTS[2]) else logits

    monkeypatch.setattr(rnn, "read", spoiled)
    spoilt, sound = engine.generate([PROMPTS[2], PROMPTS[3]], params(max_tokens=0, prompt_logprobs=0))
    assert spoilt.answers[0].finish_reason == "error"
    assert "not finite" in str(spoilt.answers[0].error)
    assert sound.answers[0].finish_reason == "length"


def test_what_has_no_log_probabilities_is_refused(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    for name in ("prompt_logprobs", "max_tokens"):
        with pytest.raises(UsageError, match=f"^{name}=0: "):
            engine.request([3, 4], params(**{name: 0}), session="a")
    for number in (-1, 21, True, 1.0):
        with pytest.raises(UsageError, match=r"^prompt_logprobs="):
            params(prompt_logprobs=number)
