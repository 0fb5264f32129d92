"""Checks of the arguments of an engine: prompts, sampling parameters and protected tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msrnn.checks import check_choice, check_count, is_whole
from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError, show


def check_prompts(prompts: Any) -> None:
    """Refuse one prompt where a list of prompts belongs."""
    if isinstance(prompts, str) or (_is_list(prompts) and any(is_whole(prompt) for prompt in prompts)):
        raise UsageError(
            "must be a list of prompts", name="prompts", value=prompts, advice="for one prompt, give [prompt]"
        )
    if not _is_list(prompts):
        raise _wrong_type("prompts", prompts, "a list of prompts")


def check_prompt(prompt: Any) -> None:
    """Refuse anything but text or a list of token ids."""
    if not isinstance(prompt, str) and not _is_list(prompt):
        raise _wrong_type("prompt", prompt, "text or a list of token ids")


def check_ids(ids: Sequence[Any], vocabulary: int) -> None:
    """Refuse a prompt without tokens, and tokens that the model does not have."""
    if not ids:
        raise UsageError("the prompt is empty: give one token or more")
    for token in ids:
        if not is_whole(token):
            raise UsageError(f"{show(token)} is not a token id", name="prompt", advice="give whole numbers, or text")
        if not 0 <= token < vocabulary:
            raise UsageError(f"token {show(token)}: this model has ids 0 to {vocabulary - 1}", name="prompt")


def check_params(params: Any) -> SamplingParams:
    """Refuse anything but `SamplingParams`; None: the default."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        advice = "give SamplingParams(max_tokens=…, temperature=…)"
        raise UsageError("must be SamplingParams", name="params", value=params, advice=advice)
    return params


def list_params(params: Any, count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts, from one for all, or from a list with one for each."""
    if not _is_list(params):
        return [check_params(params)] * count
    if len(params) != count:
        raise UsageError(f"{len(params)} params for {count} prompts: give one for all, or one for each")
    return [check_params(one) for one in params]


def list_protects(protect: Any, count: int) -> list[int | str]:
    """What each of `count` prompts protects, from one for all, or from a list with one for each."""
    if not _is_list(protect):
        return [protect] * count
    if len(protect) != count:
        raise UsageError(f"{len(protect)} for {count} prompts", name="protect", advice="give one for all, or for each")
    return [*protect]


def count_protected(protect: int | str, tokens: int) -> int:
    """The number of protected tokens at the beginning of a prompt, which has `tokens` tokens."""
    if isinstance(protect, str):
        return tokens if check_choice("protect", protect, ("none", "prompt")) == "prompt" else 0
    return check_count("protect", protect, 0, tokens, of="tokens of the prompt")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _wrong_type(name: str, value: Any, expected: str) -> UsageError:
    advice = "use its tolist()" if hasattr(value, "tolist") else None
    return UsageError(f"is of type {type(value).__name__}, and must be {expected}", name=name, advice=advice)
