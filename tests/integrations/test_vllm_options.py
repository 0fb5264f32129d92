"""The options of msrnn inside vLLM; vLLM itself is not needed."""

from __future__ import annotations

from typing import Any

import pytest

from msrnn.bound import Bound
from msrnn.errors import UsageError
from msrnn.integrations.vllm_options import Options, read_options
from msrnn.policy import Policy


def test_a_policy_and_a_size() -> None:
    options = read_options({"msrnn": {"policy": "window+4", "size": 32}, "other": 1})
    assert options == Options(Bound(Policy.parse("window+4"), 32), "auto")


def test_a_horizon_is_the_window_of_the_bound() -> None:
    bound = Options.parse({"policy": "tova~64", "size": 32, "positions": "original", "backend": "torch"}).bound
    assert (bound.window, bound.sliding) == (64, False)


@pytest.mark.parametrize("additional_config", [{}, {"other": {"policy": "tova"}}, None, object()])
def test_without_the_option_nothing_is_asked_for(additional_config: Any) -> None:
    assert read_options(additional_config) is None


REFUSED = {
    "tova": "must be a mapping",
    "{'policy': 'tova'}": "size missing",
    "{}": "policy and size missing",
    "{'policy': 'tova', 'size': 32, 'state_dtype': 'int8', 'recall': 1}": "['recall', 'state_dtype']: has unknown",
    "{'policy': 'nothing', 'size': 32}": "unknown policy 'nothing'",
    "{'policy': 'tova', 'size': 0}": "size=0: must be at least 1",
    "{'policy': 'h2o', 'size': 1, 'backend': 'cuda'}": "backend='cuda': must be one of",
    "{'policy': 'tova', 'size': 32, 'positions': 'compact'}": "positions='compact': vLLM passes on keys that are",
    "{'policy': 'tova', 'size': [32, 16]}": "size='[32, 16]': vLLM's pages have one size",
    "{'policy': 'tova:upper', 'size': 32}": "vLLM's pages have one size",
    "{'policy': 'full', 'size': 32}": "policy='full': bounds nothing; leave 'msrnn' out",
    "{'policy': 'echo@w.safetensors', 'size': 32}": "learned row weights cannot be used in vLLM",
    "{'policy': 'tova+40', 'size': 32}": "which must be fewer than size=32",
}


@pytest.mark.parametrize(("given", "reason"), REFUSED.items())
def test_what_is_refused(given: str, reason: str) -> None:
    value = eval(given) if given.startswith("{") else given
    with pytest.raises(UsageError) as refused:
        read_options({"msrnn": value})
    assert reason in str(refused.value)
