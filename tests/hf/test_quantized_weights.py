"""Quantized weights: a model is wrapped as it is, and its states are told from those of other weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import msrnn
from msrnn.errors import UsageError
from msrnn.hf.fingerprint import addresses_of, fingerprint_of, non_finite_weights
from msrnn.hf.inspect import inspect_model
from tests.helpers.tiny import build, greedy, tokens

QUANTIZED = "model.layers.1.mlp.down_proj.weight"


def plain(seed: int = 0) -> tf.PreTrainedModel:
    config = tf.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return build(config, seed=seed)


def torchao(bits: int) -> Callable[[tf.PreTrainedModel], tf.PreTrainedModel]:
    """Weight-only quantization. Int4WeightOnlyConfig needs a GPU; IntxWeightOnlyConfig has 4 bits on every device."""

    def quantize(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
        quantization = pytest.importorskip("torchao.quantization")
        four = {"weight_dtype": getattr(torch, f"int{bits}"), "granularity": quantization.PerGroup(32)}
        config = quantization.Int8WeightOnlyConfig() if bits == 8 else quantization.IntxWeightOnlyConfig(**four)
        quantization.quantize_(model, config)
        return model

    return quantize


class Wrapper(Tensor):
    """Codes and scales in a tensor that computes nothing but linear layers, as those of quantization libraries."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Any:
        scale = weight.detach().abs().amax(-1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            codes, scale = args[1].codes, args[1].scale
            return torch.nn.functional.linear(args[0], codes.to(scale.dtype) * scale, *args[2:])
        compute: Any = super().__torch_function__
        return compute(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of {cls.__name__}")


class Flattens(Wrapper):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None


class Dequantizes(Wrapper):
    def dequantize(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale


def wrapped_by(kind: type[Wrapper]) -> Callable[[tf.PreTrainedModel], tf.PreTrainedModel]:
    def quantize(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
        for module in model.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(kind.of(module.weight), requires_grad=False)
        return model

    return quantize


KINDS = {
    "torchao int8": torchao(8),
    "torchao int4": torchao(4),
    "codes and scales": wrapped_by(Flattens),
    "dequantizes": wrapped_by(Dequantizes),
}


def differing_in_one_weight(quantize: Callable[[tf.PreTrainedModel], tf.PreTrainedModel]) -> tf.PreTrainedModel:
    model = plain()
    with torch.no_grad():
        model.get_parameter(QUANTIZED).copy_(plain(seed=1).get_parameter(QUANTIZED))
    return quantize(model)


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
