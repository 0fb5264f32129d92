from __future__ import annotations

import math
from typing import Any

import pytest

from msrnn.engine.requests import NOT_FINITE_ERROR, Logprobs, Request, SamplingParams, explain
from msrnn.engine.session_id import SessionId
from msrnn.errors import FileError, SessionStorageFullError, UsageError


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be a number from 0 to 100"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0: must be a number from 1e-06 to 1"),
        ({"top_p": 1e-46}, "top_p=1e-46: must be a number from 1e-06 to 1"),
        ({"top_k": 10**400}, "top_k=1000000"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300: must be a number from 0.01"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty=5e-324: must be a number from 0.01"),
        ({"max_tokens": 10**400}, "max_tokens=1000000"),
        ({"top_p": True}, "top_p=True"),
        ({"top_k": -1}, "top_k=-1: must be a whole number, from 0 to 2,147,483,647"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"max_tokens": -1}, "max_tokens=-1: must be a whole number, from 0 to 2,147,483,647"),
        ({"max_tokens": 2.0}, "max_tokens=2.0"),
        ({"n": 0}, "n=0"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be a number from 0.01 to 100"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: must be a number from -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty='1'"),
        ({"logprobs": 21}, "logprobs=21: must be a whole number, from 0 to 20"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"stop": "end"}, "stop='end': must be a list of strings"),
        ({"stop": [""]}, "none of them empty"),
        ({"stop": 5}, "stop=5: must be a list of strings"),
        ({"stop": None}, "stop=None: must be a list of strings"),
        ({"stop_token_ids": 5}, "stop_token_ids=5: must be a list of token ids"),
        ({"shown_tokens": "5"}, "must be a list of token ids"),
        ({"logit_bias": [5]}, "logit_bias=[5]: must be a dict of token ids and numbers"),
        ({"logit_bias": {3: 101}}, "logit_bias: token 3 has 101; must be from -100 to 100"),
    ],
)
def test_values_out_of_range_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**params)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ["a"] * 17}, "stop: 17 strings, the longest of 1 characters; at most 16 strings of 1,000"),
        ({"stop": ["a" * 1001]}, "stop: 1 strings, the longest of 1,001 characters"),
        ({"stop_token_ids": [3] * 1001}, "stop_token_ids: 1,001 tokens; at most 1,000"),
        ({"logit_bias": dict.fromkeys(range(1001), 1)}, "logit_bias: 1,001 tokens"),
        ({"logit_bias": {3: math.nan}}, "logit_bias: token 3 has nan"),
        ({"seed": None, "n": None}, "n=None"),
    ],
)
def test_many_values_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**params)
    assert message in str(error.value)


def test_values_at_their_limits_are_taken() -> None:
    SamplingParams(max_tokens=0, temperature=0, top_p=1e-6, seed=-(2**63), logprobs=20, stop=["a" * 1000] * 16)
    SamplingParams(max_tokens=2**31 - 1, temperature=100, top_p=1, seed=2**64 - 1, logit_bias={3: -100, 4: 100})


@pytest.mark.parametrize("token", [-1, 97, 2.0, True])
@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "shown_tokens"])
def test_tokens_that_the_model_does_not_have(name: str, token: Any) -> None:
    SamplingParams(stop_token_ids=[0, 96], logit_bias={0: 1, 96: 1}).check_tokens(97)
    given: dict[str, Any] = {name: {token: 1} if name == "logit_bias" else [token]}
    params = SamplingParams(**given)
    with pytest.raises(UsageError, match=f"{name}: token {token!r}: this model has ids 0 to 96") as refused:
        params.check_tokens(97)
    assert refused.value.name == name


@pytest.mark.parametrize(("name", "value"), [("n", 2), ("max_tokens", 0), ("prompt_logprobs", 0)])
def test_a_session_refuses(name: str, value: int) -> None:
    SamplingParams().check_session()
    with pytest.raises(UsageError) as refused:
        SamplingParams(**{name: value}).check_session()  # type: ignore[arg-type]
    assert refused.value.name == name


def test_which_parameters_penalize() -> None:
    assert not SamplingParams(logit_bias={3: 1}).penalizes
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).penalizes  # type: ignore[arg-type]


def test_a_request_has_a_seed_and_its_answers() -> None:
    assert Request([5], SamplingParams(seed=0)).seed == 0
    one, other = (Request([5], SamplingParams(n=3)) for _ in range(2))
    assert len(one.answers) == 3
    assert one.seed != other.seed
    assert not one.finished


def test_an_end_is_of_answers_that_are_not_finished() -> None:
    request = Request([5], SamplingParams(n=3))
    request.answers[1].finish_reason = "stop"
    events = request.fail("broken", "a_code")
    assert [(event.number, event.token, event.finish_reason) for event in events] == [
        (0, None, "error"),
        (2, None, "error"),
    ]
    assert [(answer.error, answer.error_code) for answer in request.answers] == [
        ("broken", "a_code"),
        (None, None),
        ("broken", "a_code"),
    ]
    assert request.finished
    assert request.end("length") == []


def test_the_end_of_a_prompt_without_an_answer() -> None:
    assert Request([5], SamplingParams(max_tokens=1)).end_unanswered() == []
    (event,) = Request([5], SamplingParams(max_tokens=0)).end_unanswered()
    assert event.finish_reason == "length"
    request = Request([5, 6], SamplingParams(max_tokens=1, prompt_logprobs=0))
    request.prompt_logprobs = [None, Logprobs(math.nan, [])]
    (event,) = request.end_unanswered()
    assert (event.finish_reason, request.answers[0].error) == ("error", NOT_FINITE_ERROR)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SessionStorageFullError("is full", SessionId("talk")), ("session 'talk': is full", "session_storage_full")),
        (FileError("damaged", "/home/ann/talk"), ("damaged", None)),
        (UsageError("must be 1", name="n", value=2), ("n=2: must be 1", None)),
        (OSError(28, "No space left on device", "/home/ann/talk"), ("No space left on device", None)),
        (OSError("of /home/ann"), ("internal error (OSError)", None)),
        (KeyError("a prompt"), ("internal error (KeyError)", None)),
    ],
)
def test_what_a_client_reads_of_an_error(error: Exception, expected: tuple[str, str | None]) -> None:
    """No path of this machine, and no text of another request."""
    assert explain(error) == expected
