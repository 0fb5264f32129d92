"""Answers with a constraint: greedy and drawn, in batches with others, continued, and in sessions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import llguidance.hf
import pytest

import msrnn
from msrnn.engine import sampling
from msrnn.engine.constraint import Constraint
from msrnn.engine.executor import NO_TOKEN, TOO_COMPLEX
from msrnn.engine.grammars import GrammarError, Matcher, find_allowed
from msrnn.engine.lanes import LongEngine
from msrnn.engine.requests import Request, SamplingParams
from msrnn.errors import UsageError
from tests.helpers.byte_tokenizer import byte_model, byte_tokenizer
from tests.helpers.step_orders import ORDERS, use_order

PROMPT = "the answer is "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bo"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[False, True], ids=ORDERS)
def engine(request: pytest.FixtureRequest) -> Iterator[msrnn.Engine]:
    with pytest.MonkeyPatch.context() as patch:
        use_order(patch, request.param)
        rnn = msrnn.MultiStateRNN(byte_model(), "tova", 16)
        yield msrnn.Engine(rnn, slots=4, tokenizer=byte_tokenizer())


def answer(engine: msrnn.Engine, constraint: Constraint | None, prompt: str = PROMPT, **params: Any) -> Request:
    given = SamplingParams(constraint=constraint, **{"max_tokens": 200, "temperature": 0, **params})
    (request,) = engine.generate([prompt], given, progress=False)
    return request


def text(engine: msrnn.Engine, constraint: Constraint | None, **params: Any) -> str:
    (found,) = answer(engine, constraint, **params).answers
    assert found.finish_reason == "stop", found
    return found.text


@pytest.mark.parametrize("temperature", [0, 1, 3.0])
def test_answers_follow_their_constraint(engine: msrnn.Engine, temperature: float) -> None:
    for seed in range(3 if temperature else 1):
        given: dict[str, Any] = {"temperature": temperature, "seed": seed}
        assert text(engine, Constraint.choice(["red", "green", "blue"]), **given) in ("red", "green", "blue")
        assert re.fullmatch(r"[a-c]{3,5}-\d", text(engine, Constraint.regex(r"[a-c]{3,5}-\d"), **given))
        found = json.loads(text(engine, Constraint.json(SCHEMA), max_tokens=400, **given))
        assert found["name"] in ("ann", "bo")
        assert len(found["ages"]) <= 3
        assert all(type(age) is int for age in found["ages"])
        assert re.fullmatch("(ab)+!", text(engine, Constraint.grammar('start: "ab" start | "ab!"'), top_k=1, **given))


def test_limits_and_biases_do_not_leave_the_grammar(engine: msrnn.Engine) -> None:
    digits, letter = Constraint.regex(r"\d{4}"), byte_tokenizer()("x").input_ids[0]
    given: dict[str, Any] = {"logit_bias": {letter: 100}, "presence_penalty": 2, "repetition_penalty": 9}
    assert re.fullmatch(r"\d{4}", text(engine, digits, **given))
    assert re.fullmatch(r"\d{4}", text(engine, digits, temperature=1, top_k=2, top_p=0.3, min_p=0.2, **given))


def test_others_in_the_batch_answer_as_they_do_alone(engine: msrnn.Engine) -> None:
    free = [SamplingParams(max_tokens=30, temperature=one, seed=3, ignore_eos=True) for one in (0, 1)]
    bound = [
        SamplingParams(max_tokens=30, temperature=one, seed=3, constraint=Constraint.regex("[ab]{20}"))
        for one in (0, 1)
    ]
    alone = [engine.generate([PROMPT], one, progress=False)[0].answers[0].tokens for one in [*free, *bound]]
    together = engine.generate([PROMPT] * 4, [free[0], bound[0], free[1], bound[1]], progress=False)
    found = [request.answers[0].tokens for request in together]
    assert found == [alone[0], alone[2], alone[1], alone[3]]


def test_answers_to_one_prompt_have_places_of_their_own(engine: msrnn.Engine) -> None:
    request = answer(engine, Constraint.regex("[a-z]{1,30}"), n=4, temperature=2.0, seed=0)
    texts = [one.text for one in request.answers]
    assert all(re.fullmatch("[a-z]{1,30}", one) for one in texts)
    assert len(set(texts)) > 1


def test_steps_compile_and_replay_nothing(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others would wait."""
    request = engine.request(
        PROMPT + "ab", SamplingParams(n=3, max_tokens=9, constraint=Constraint.regex("[ab]{5}"), continued=2)
    )
    advanced: list[int] = []
    advance = Matcher.advance

    def count(self: Matcher, token: int) -> None:
        advanced.append(token)
        advance(self, token)

    monkeypatch.setattr(Matcher, "advance", count)
    monkeypatch.setattr(engine.grammars, "start", None)
    engine.add(request)
    while not engine.idle:
        engine.step()
    assert all(re.fullmatch("[ab]{3}", answer.text) for answer in request.answers)
    assert len(advanced) <= 3 * 4
    with pytest.raises(UsageError, match=r"made by Engine\.request"):
        Request(request.prompt, request.params)


def test_log_probabilities_are_the_model_s_own(engine: msrnn.Engine) -> None:
    bound = answer(engine, Constraint.regex("zq"), logprobs=2).answers[0]
    free = answer(engine, None, logprobs=2, max_tokens=1, ignore_eos=True).answers[0]
    assert bound.text == "zq"
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].chosen <= free.logprobs[0].chosen


def test_a_cut_answer_and_the_rest_of_it(engine: msrnn.Engine) -> None:
    """The last tokens of a prompt may be the beginning of the answer, as after a failure."""
    constraint, tokenizer = Constraint.json(SCHEMA), byte_tokenizer()
    whole = answer(engine, constraint, temperature=1, seed=5).answers[0]
    cut = answer(engine, constraint, temperature=1, seed=5, max_tokens=9).answers[0]
    assert cut.finish_reason == "length"
    assert whole.tokens[:9] == cut.tokens
    prompt = [*tokenizer(PROMPT).input_ids, *cut.tokens]
    params = SamplingParams(max_tokens=200, seed=5, constraint=constraint, continued=9)
    (rest,) = engine.generate([prompt], params, progress=False)[0].answers
    assert [*cut.tokens, *rest.tokens] == whole.tokens
    with pytest.raises(UsageError, match="does not allow the beginning"):
        engine.request(tokenizer("{x").input_ids, SamplingParams(constraint=constraint, continued=1))


def test_turns_of_a_session_have_a_constraint_each(engine: msrnn.Engine) -> None:
    for turn, constraint in enumerate([Constraint.regex("[ab]{5}"), None, Constraint.choice(["yes", "no"])]):
        request = engine.request(
            f"turn {turn}", SamplingParams(max_tokens=8, temperature=0, constraint=constraint), session="talk"
        )
        engine.add(request)
        while not engine.idle:
            engine.step()
        assert request.answers[0].error is None
        if constraint is not None:
            assert re.fullmatch("[ab]{5}|yes|no", request.answers[0].text)
    engine.sessions.delete("talk")


def test_what_cannot_be_followed_is_refused_before_it_is_added(engine: msrnn.Engine) -> None:
    with pytest.raises(UsageError, match="constraint: this regex cannot be followed"):
        engine.request(PROMPT, SamplingParams(constraint=Constraint.regex("(")))


def test_a_grammar_that_fails_ends_its_own_answer_only(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def fail_at_the_third(matchers: list[Matcher]) -> Any:
        calls.append(len(matchers))
        if len(calls) >= 3:
            raise GrammarError("too complex")
        return find_allowed(matchers)

    monkeypatch.setattr(sampling, "find_allowed", fail_at_the_third)
    bound = SamplingParams(max_tokens=20, temperature=0, constraint=Constraint.regex("[ab]{20}"))
    free = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    one, other = engine.generate([PROMPT, PROMPT], [bound, free], progress=False)
    assert one.answers[0].error == NO_TOKEN[TOO_COMPLEX]
    assert one.answers[0].finish_reason == "error"
    assert len(one.answers[0].tokens) < 4
    assert other.answers[0].tokens == answer(engine, None, max_tokens=20, ignore_eos=True).answers[0].tokens


def test_long_and_short_answers_share_the_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second reading of the tokenizer would make all answers wait for seconds."""
    read: list[object] = []
    from_tokenizer = llguidance.hf.from_tokenizer

    def count(tokenizer: Any, **more: Any) -> Any:
        read.append(tokenizer)
        return from_tokenizer(tokenizer, **more)

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", count)
    model = byte_model()
    longer = msrnn.MultiStateRNN(model, "tova+1~36", 9, positions="compressed")
    engine = LongEngine(msrnn.MultiStateRNN(model, "tova", 9), longer, 64, 4, tokenizer=byte_tokenizer())
    params = SamplingParams(max_tokens=20, temperature=0, constraint=Constraint.regex("[xyz]{7}"))
    for request in engine.generate(["short", "long" * 20], params, progress=False):
        assert re.fullmatch("[xyz]{7}", request.answers[0].text)
    assert (engine.long_requests, len(read)) == (1, 1)
