"""Models with quantized weights, by libraries and by tensor subclasses as libraries have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from tests.helpers.tiny import build

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
