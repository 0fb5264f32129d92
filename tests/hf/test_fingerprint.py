"""A model is known by its weights, quantized and offloaded ones as well."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor

import msrnn
from msrnn.hf.fingerprint import addresses_of, fingerprint_of, non_finite_weights
from msrnn.hf.inspect import inspect_model
from tests.helpers.quantized import (
    KINDS,
    QUANTIZED,
    Wrapper,
    differing_in_one_weight,
    plain,
    wrapped_by,
)
from tests.helpers.tiny import build, llama, tokens


@pytest.mark.parametrize("kind", ["torchao int8", "torchao int4", "codes and scales"])
def test_weights_that_change_or_move_are_noticed(kind: str) -> None:
    model = KINDS[kind](plain())
    before, addresses = inspect_model(model), addresses_of(model.get_parameter(QUANTIZED))
    assert inspect_model(model) is before
    model.get_parameter(QUANTIZED).scale[5] *= 2
    assert inspect_model(model) is not before
    other = KINDS[kind](plain()).get_parameter(QUANTIZED)
    assert not set(addresses) & set(addresses_of(other))
    assert addresses_of(model.get_parameter(QUANTIZED)) == addresses


def test_packed_weights_have_a_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch itself are no tensors."""
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")  # torch's own choice fails on some ARM machines

    def quantize(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    assert fingerprint_of(quantize(plain())) == fingerprint_of(quantize(plain()))
    assert fingerprint_of(quantize(plain())) != fingerprint_of(differing_in_one_weight(quantize))


def test_weights_that_cannot_be_sampled_do_not_stop_a_model_and_are_told() -> None:
    model, ids = wrapped_by(Wrapper)(plain()), tokens(1, 12)
    with torch.no_grad():
        expected = model(ids).logits
    with pytest.warns(UserWarning, match=r"14 weights of this LlamaForCausalLM cannot be sampled, model\.layers\.0"):
        rnn = msrnn.MultiStateRNN(model, "tova", 64)
    torch.testing.assert_close(rnn.read(ids, rnn.state()), expected, atol=1e-4, rtol=1e-4)
    with warnings.catch_warnings(action="ignore"):
        assert fingerprint_of(wrapped_by(Wrapper)(plain())) != fingerprint_of(wrapped_by(Wrapper)(plain(seed=1)))


def test_a_subclass_without_a_wrapper_counts_as_the_tensor_that_it_is() -> None:
    class Named(Tensor):
        pass

    model = plain()
    expected = fingerprint_of(model)
    weight = model.get_parameter(QUANTIZED)
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(weight.detach().as_subclass(Named))
    assert fingerprint_of(model) == expected


@pytest.mark.parametrize("kind", [*KINDS, "closed"])
def test_scales_that_are_not_finite_are_found(kind: str) -> None:
    model = KINDS.get(kind, wrapped_by(Wrapper))(plain())
    assert non_finite_weights(model) is None
    weight = model.get_parameter(QUANTIZED)
    if hasattr(weight, "__tensor_flatten__"):
        weight.scale[0] = torch.nan
        assert QUANTIZED in str(non_finite_weights(model))


def test_a_model_with_damaged_weights_is_named() -> None:
    model = build(llama())
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match="keys of layer 1 are NaN or infinite"):
        msrnn.MultiStateRNN(model, "tova", 8)
    assert model.config._attn_implementation == "eager"


def test_quantized_weights_have_a_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")  # torch's own choice fails on some ARM machines
    model = build(llama())
    quantized = torch.ao.quantization.quantize_dynamic(build(llama()), {torch.nn.Linear}, dtype=torch.qint8)
    other = torch.ao.quantization.quantize_dynamic(build(llama(), seed=1), {torch.nn.Linear}, dtype=torch.qint8)
    assert len({fingerprint_of(m) for m in (model, quantized, other)}) == 3
    rnn = msrnn.MultiStateRNN(quantized, "tova", 8)
    assert rnn.read(tokens(1, 12), rnn.state()).isfinite().all()


def test_offloaded_weights_have_a_fingerprint(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    plain = msrnn.MultiStateRNN(build(llama()), "tova", 8)
    expected = plain.read(tokens(1, 12), plain.state())
    places = {"model.layers.1": "disk", "model.layers.0": "cpu", "lm_head": "cpu"}
    rest = {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb")}
    model = accelerate.dispatch_model(build(llama()), {**places, **rest}, main_device="cpu", offload_dir=tmp_path)
    rnn = msrnn.MultiStateRNN(model, "tova", 8)
    torch.testing.assert_close(rnn.read(tokens(1, 12), rnn.state()), expected)
    assert torch.equal(rnn.generate(tokens(1, 12), max_new_tokens=5), plain.generate(tokens(1, 12), max_new_tokens=5))


def test_a_fingerprint_tells_weights_apart() -> None:
    assert fingerprint_of(build(llama())) == fingerprint_of(build(llama()))
    assert fingerprint_of(build(llama())) != fingerprint_of(build(llama(), seed=1))


def test_a_rounded_fingerprint_is_that_of_both_precisions() -> None:
    model = build(llama())
    rounded = fingerprint_of(model, rounded=True)
    shorter = build(llama()).bfloat16()
    assert fingerprint_of(shorter, rounded=True) == rounded
    assert fingerprint_of(shorter) != fingerprint_of(model)
    assert fingerprint_of(build(llama(), seed=1), rounded=True) != rounded
