"""Wrong arguments of an engine are named, with what to give instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import msrnn
from msrnn.engine.arguments import (
    check_ids,
    check_params,
    check_prompt,
    check_prompts,
    count_protected,
    list_params,
    list_protects,
)
from msrnn.errors import UsageError


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 2, 3], r"prompts=\[1, 2, 3\]: must be a list of prompts; for one prompt, give \[prompt\]"),
        ("one text", "prompts='one text': must be a list of prompts"),
        (torch.tensor([[1, 2]]), r"prompts: is of type Tensor, and must be a list of prompts; use its tolist\(\)"),
        (5, "prompts: is of type int, and must be a list of prompts$"),
        (None, "prompts: is of type NoneType"),
    ],
)
def test_what_is_no_list_of_prompts(prompts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_prompts(prompts)


def test_lists_of_prompts() -> None:
    for prompts in ([], [[1, 2], "text"], ((1, 2),)):
        check_prompts(prompts)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.tensor([1, 2]), r"prompt: is of type Tensor, and must be text or a list of token ids; use its tolist"),
        (b"text", "prompt: is of type bytes"),
        (5, "prompt: is of type int, and must be text"),
    ],
)
def test_what_is_no_prompt(prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_prompt(prompt)
    for one in ("text", [1, 2], range(3)):
        check_prompt(one)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([3, 9], "prompt: token 9: this model has ids 0 to 8"),
        ([-1], "prompt: token -1: this model has"),
        ([[1, 2]], r"prompt: \[1, 2\] is not a token id; give whole numbers, or text"),
        ([True], "prompt: True is not a token id"),
    ],
)
def test_tokens_that_the_model_does_not_have(ids: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_ids(ids, 9)
    check_ids([0, 8], 9)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, {}, 5, "greedy"])
def test_what_are_no_parameters(params: Any) -> None:
    with pytest.raises(UsageError, match=r"^params=.*: must be SamplingParams; give SamplingParams\(max_tokens"):
        check_params(params)
    with pytest.raises(UsageError, match="must be SamplingParams"):
        list_params(params, 2)
    with pytest.raises(UsageError, match="must be SamplingParams"):
        list_params([None, params], 2)


def test_parameters_for_all_prompts_or_for_each() -> None:
    one, other = msrnn.SamplingParams(n=2), msrnn.SamplingParams()
    assert check_params(None) == other
    assert list_params(one, 2) == [one, one]
    assert list_params([one, None], 2) == [one, other]
    with pytest.raises(UsageError, match="1 params for 2 prompts"):
        list_params([one], 2)


def test_protected_tokens_of_a_prompt() -> None:
    assert [count_protected(given, 7) for given in ("none", "prompt", 0, 7)] == [0, 7, 0, 7]
    wrong: Any
    for wrong in (8, -1, "all", None):
        with pytest.raises(UsageError, match=f"protect={wrong!r}"):
            count_protected(wrong, 7)


def test_what_each_prompt_protects() -> None:
    assert list_protects("prompt", 2) == ["prompt", "prompt"]
    assert list_protects(3, 2) == [3, 3]
    assert list_protects([0, 3], 2) == [0, 3]
    with pytest.raises(UsageError, match="protect: 1 for 2 prompts; give one for all, or for each"):
        list_protects([3], 2)
