"""Random networks of row weights, and files of them for tiny models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from msrnn.bound import Bound
from msrnn.core.buffers import LayerShape
from msrnn.core.rope import Rope
from msrnn.core.weight_network import WeightNetwork
from msrnn.core.weights_file import HeadShape, save_weights
from msrnn.hf.inspect import inspect_model
from msrnn.hf.learned_weights import head_shapes


def random_network(shape: HeadShape, seed: int = 0, width: int = 6, rope: Rope | None = None) -> WeightNetwork:
    """A network whose output varies about as much as the logarithm of a norm, or more."""
    draw = torch.Generator().manual_seed(seed)
    heads, inputs = shape.kv_heads, shape.key_dim + shape.value_dim
    return WeightNetwork(
        mean=torch.randn(heads, inputs, generator=draw) * 0.3,
        scale=torch.rand(heads, inputs, generator=draw) + 0.5,
        hidden=torch.randn(heads, width, inputs, generator=draw) * inputs**-0.5,
        hidden_bias=torch.randn(heads, width, generator=draw) * 0.3,
        output=torch.randn(heads, width, generator=draw),
        output_bias=torch.randn(heads, generator=draw),
        alpha=torch.rand((), generator=draw) + 0.5,
        rope=rope,
    )


def add_network(shape: LayerShape, bound: Bound, rope: Rope | None = None) -> LayerShape:
    """The shape of a layer with a random network, if its policy has learned row weights."""
    heads = HeadShape(shape.kv_heads, shape.key_dim, shape.value_dim)
    network = random_network(heads, rope=rope) if bound.policy.learned else None
    return replace(shape, network=network and network.on(shape.device))


def random_networks(model: PreTrainedModel, seed: int = 0, width: int = 6) -> list[WeightNetwork | None]:
    shapes = head_shapes(inspect_model(model))
    return [shape and random_network(shape, seed + i, width) for i, shape in enumerate(shapes)]


def write_random_weights(path: Path, model: PreTrainedModel, seed: int = 0, width: int = 6) -> Path:
    """A file of random weights for a model."""
    spec = inspect_model(model)
    save_weights(path, random_networks(model, seed, width), spec.rounded_fingerprint, spec.architecture)
    return path
