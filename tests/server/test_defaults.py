from __future__ import annotations

import pytest
from transformers import GenerationConfig

from msrnn.errors import UsageError
from msrnn.server.defaults import NEUTRAL, sampling_defaults


def test_sampling_defaults_of_a_model() -> None:
    """Only what the file states; nothing else is changed, and wrong values are not passed over."""
    assert sampling_defaults(GenerationConfig()) == {}
    assert sampling_defaults(GenerationConfig(eos_token_id=5, max_new_tokens=9)) == {}
    stated = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    assert sampling_defaults(GenerationConfig(do_sample=True, **stated)) == stated
    assert sampling_defaults(GenerationConfig(temperature=0.6)) == {"temperature": 0.6}
    assert sampling_defaults(GenerationConfig(do_sample=False, repetition_penalty=1.1)) == {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
    }
    assert sampling_defaults(GenerationConfig(do_sample=True, top_k=-1))["top_k"] == 0
    config = GenerationConfig()
    config.temperature = -3.0
    with pytest.raises(UsageError, match="generation config: temperature"):
        sampling_defaults(config)


def test_neutral_values_change_nothing() -> None:
    assert NEUTRAL == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
