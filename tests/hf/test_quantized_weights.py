"""Quantized weights: a model is wrapped as it is, and its states are told from those of other weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import msrnn
from msrnn.errors import UsageError
from tests.helpers.quantized import (
    KINDS,
    differing_in_one_weight,
    plain,
)
from tests.helpers.tiny import greedy, tokens


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_quantized_model_is_bounded_exactly(kind: str, tmp_path: Path) -> None:
    model, ids = KINDS[kind](plain()), tokens(2, 24)
    expected, answer = model(ids).logits, model.generate(ids, attention_mask=torch.ones_like(ids), **greedy())
    assert not torch.equal(expected, plain()(ids).logits)
    rnn = msrnn.MultiStateRNN(model, "tova", 64)
    torch.testing.assert_close(rnn.read(ids, rnn.state(2)), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(rnn.generate(ids, **greedy()), answer)
    bounded = msrnn.MultiStateRNN(model, "tova", 8)
    state = bounded.state(2)
    bounded.read(ids, state)
    state.save(tmp_path / "state")
    again = msrnn.MultiStateRNN(KINDS[kind](plain()), "tova", 8)
    loaded = again.load_state(tmp_path / "state")
    assert torch.equal(again.step(ids[:, :1], loaded), bounded.step(ids[:, :1], state))


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_other_quantized_weights_are_refused(kind: str, tmp_path: Path) -> None:
    quantize = KINDS[kind]
    rnn = msrnn.MultiStateRNN(quantize(plain()), "tova", 8)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    state.save(tmp_path / "state")
    for other in (plain(), differing_in_one_weight(quantize)):
        with pytest.raises(UsageError, match="other weights than those of this model, LlamaForCausalLM"):
            msrnn.MultiStateRNN(other, "tova", 8).load_state(tmp_path / "state")


def test_a_compiled_model_is_refused_with_advice() -> None:
    for wrap in (msrnn.MultiStateRNN, msrnn.MultiStateCache):
        with pytest.raises(TypeError, match=r"torch\.compile has wrapped: pass the model itself.*compile=True"):
            wrap(torch.compile(plain()), "tova", 8)


def test_adapters_are_refused_with_advice_and_merged() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted, ids = peft.get_peft_model(plain(), config).eval(), tokens(1, 12)
    with torch.no_grad():
        expected = adapted(ids).logits
    for wrap in (msrnn.MultiStateRNN, msrnn.MultiStateCache):
        with pytest.raises(TypeError, match=r"PeftModelForCausalLM .* pass model\.merge_and_unload\(\)"):
            wrap(adapted, "tova", 8)
    rnn = msrnn.MultiStateRNN(adapted.merge_and_unload(), "tova", 64)
    torch.testing.assert_close(rnn.read(ids, rnn.state()), expected, atol=1e-3, rtol=1e-3)


def test_other_wrappers_are_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"DataParallel is a wrapper around a model: pass .* model\.module"):
        msrnn.MultiStateRNN(torch.nn.DataParallel(plain()), "tova", 8)
    with pytest.raises(TypeError, match="Linear is not a transformers model"):
        msrnn.MultiStateRNN(torch.nn.Linear(2, 2), "tova", 8)
