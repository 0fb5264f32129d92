"""From options to a layout: what is wrong is refused, and the model stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import msrnn
from msrnn.hf.specify import state_spec
from tests.helpers.tiny import build, llama


@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"block": 0}, {"size": 0}, {"policy": "tovas"}, {"backend": "none"}])
def test_a_refused_wrap_leaves_the_model_alone(wrong: dict[str, Any], passes: list[torch.nn.Module]) -> None:
    model = build(llama())
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        msrnn.MultiStateRNN(model, **{"policy": "tova", "size": 9, **wrong})
    assert model.config._attn_implementation == "eager"
    if "backend" not in wrong:  # which depends on the devices that the layers are on
        assert passes == []


def test_what_a_spec_says_of_its_options() -> None:
    spec = state_spec(build(llama()), "echo", [9, 6], state_dtype="int8")
    assert (spec.sizes, spec.mean_size, [*spec.divided]) == ([9, 6], 7, [0, 1])
    assert spec.fingerprint["policy"] == "echo"
    assert spec.fingerprint["size"] == [9, 6]
    assert spec.fingerprint["dtype"] == "int8"
    assert "size=[9, 6]" in spec.summary
    unbounded = state_spec(build(llama()), "full", None)
    assert (unbounded.sizes, unbounded.mean_size) == ([None, None], 0)
