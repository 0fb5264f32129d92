from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from msrnn.server.request_models import ChatRequest, CompletionRequest, ForkRequest

HELLO = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate(fields)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], ["a", "b"]),
        (["a", [5]], ["a", [5]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], [[]], None, 5, [5, "a"], [True], [5.0], {"a": 1}, "\ud800"])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        completion(prompt=prompt)


@pytest.mark.parametrize(
    "field",
    [
        {"n": "1"},
        {"n": 1.0},
        {"n": True},
        {"stream": 1},
        {"temperature": True},
        {"temperature": 100.5},
        {"top_p": 0},
        {"top_k": -2},
        {"seed": 2**64},
        {"logprobs": 21},
        {"logit_bias": {"-1": 0}},
        {"logit_bias": {"1": 101}},
        {"stop": ["x"] * 17},
        {"stop_token_ids": [3] * 1001},
        {"session_id": "../up"},
        {"session_turns": -1},
        {"retention": -1},
        {"user": "x" * 1001},
        {"unknown": 1},
    ],
)
def test_types_and_bounds_are_strict(field: dict[str, Any]) -> None:
    completion(prompt="a")
    with pytest.raises(ValidationError) as error:
        completion(prompt="a", **field)
    assert error.value.errors()[0]["loc"][0] == next(iter(field))


def test_values_at_their_bounds() -> None:
    most: dict[str, Any] = {
        "temperature": 100,
        "top_k": -1,
        "seed": -(2**63),
        "logit_bias": {"5": -100},
        "logprobs": 20,
    }
    found = completion(prompt="a", stop=["x" * 1000] * 16, stop_token_ids=[3] * 1000, **most)
    assert (found.temperature, found.top_k, found.seed) == (100, -1, -(2**63))


def test_a_chat_has_an_answer() -> None:
    assert completion(prompt="a", max_tokens=0).max_tokens == 0
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(ValidationError):
            ChatRequest.model_validate({"messages": [HELLO], name: 0})
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"messages": []})


def test_a_fork() -> None:
    assert ForkRequest(to="other").to == "other"
    for wrong in ({}, {"to": 3}, {"to": "a", "from": "b"}):
        with pytest.raises(ValidationError):
            ForkRequest.model_validate(wrong)
