"""Learned row weights of one new token in numba; `msrnn.core.weight_network` is the reference."""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple

import numpy as np
import torch
from numpy import float32 as f32
from numpy import float64 as f64
from torch import Tensor

from msrnn.backends.numba.jit import compile_loop
from msrnn.backends.numba.rope import layout, rotate, rotation
from msrnn.backends.numba.rows import Array
from msrnn.core.quantization import Rows
from msrnn.core.slots import Slots
from msrnn.core.weight_network import MOST_DEVIATION, MOST_EXPONENT, WeightNetwork

_FARTHEST, _MOST = f32(MOST_DEVIATION), f32(MOST_EXPONENT)
_PER_PI = math.sqrt(2 / math.pi)
_NO_ROPE = np.empty(0, f32)


class Prepared(NamedTuple):
    """A network for the loop; inputs are in the order of `rotate`, and products are in float64 as in the reference."""

    frequency: Array  # [F]; empty: keys are not rotated
    start: int
    step: int
    mean: Array  # [K, I]
    scale: Array  # [K, I]
    hidden: Array  # [K, N, I]
    hidden_bias: Array  # [K, N]
    output: Array  # [K, N]
    output_bias: Array  # [K]
    alpha: f32


_PREPARED: weakref.WeakKeyDictionary[WeightNetwork, Prepared] = weakref.WeakKeyDictionary()


def weigh_token(slots: Slots, key: Tensor, value: Tensor, position: Tensor) -> Tensor | None:
    """The weights [B, G, 1] of one new row in each head: key [B, K, D] and value [B, K, Dv], at position [B]."""
    if slots.network is None or slots.shards is not None or slots.joint is not None:
        rows = Rows(key[:, :, None], None), Rows(value[:, :, None], None)
        return slots.weigh(*rows, position[:, None, None])
    if slots.network not in _PREPARED:
        _PREPARED[slots.network] = prepare(slots.network, key.shape[-1])
    weights = torch.empty(len(key), slots.position.shape[1], 1)
    keys, values = key.float().contiguous().numpy(), value.float().contiguous().numpy()
    _weigh(keys, values, position.contiguous().numpy(), *_PREPARED[slots.network], weights.numpy())
    return weights


def prepare(network: WeightNetwork, key_dim: int) -> Prepared:
    parts, rope = {name: tensor.numpy() for name, tensor in network.tensors().items()}, network.rope
    order = np.arange(parts["mean"].shape[1])
    if rope is not None:
        (first, second), keys = rope.pairs, order[:key_dim]
        rest = [keys[: rope.start], keys[rope.start + 2 * len(rope.frequency) :]]
        order = np.concatenate([keys[first], keys[second], *rest, order[key_dim:]])
    frequency = _NO_ROPE if rope is None else rope.frequency.numpy()
    start, step = (0, 1) if rope is None else layout(rope)
    return Prepared(
        frequency,
        start,
        step,
        mean=np.ascontiguousarray(parts["mean"][..., order]),
        scale=np.ascontiguousarray(parts["scale"][..., order]),
        hidden=np.ascontiguousarray(parts["hidden"][..., order], f64),
        hidden_bias=parts["hidden_bias"].astype(f64),
        output=parts["output"].astype(f64),
        output_bias=parts["output_bias"].astype(f64),
        alpha=f32(parts["alpha"]),
    )


@compile_loop()
def _weigh(
    key: Array,
    value: Array,
    position: Array,
    frequency: Array,
    start: int,
    step: int,
    mean: Array,
    scale: Array,
    hidden: Array,
    hidden_bias: Array,
    output: Array,
    output_bias: Array,
    alpha: f32,
    weights: Array,
) -> None:
    (B, K, D), G, F = key.shape, weights.shape[1], frequency.shape[0]
    members, row, inputs = K // G, np.empty(mean.shape[1], f32), np.empty(mean.shape[1], f64)
    cos, sin = np.empty(F, f32), np.empty(F, f32)
    for b in range(B):
        rotation(frequency, position[b], 0.0, cos, sin)
        for g in range(G):
            squares, graded = f32(0.0), f32(0.0)
            for k in range(g * members, (g + 1) * members):
                rotate(key[b, k], start, step, cos, sin, row)
                row[D:] = value[b, k]
                _standardise(row, mean[k], scale[k], inputs)
                squares += _square(value[b, k])
                graded += f32(_run(inputs, hidden[k], hidden_bias[k], output[k]) + output_bias[k])
            exponent = (f32(0.5) * np.log(squares) + graded / f32(members)) / alpha
            exponent = _MOST if exponent > _MOST else exponent
            weights[b, g, 0] = np.exp(-_MOST if exponent < -_MOST else exponent)  # NaN stays NaN


@compile_loop()
def _standardise(row: Array, mean: Array, scale: Array, into: Array) -> None:
    for i in range(row.shape[0]):
        x = (row[i] - mean[i]) / scale[i]
        x = _FARTHEST if x > _FARTHEST else x
        into[i] = -_FARTHEST if x < -_FARTHEST else x


@compile_loop(fastmath={"reassoc", "contract"})
def _square(row: Array) -> f32:
    total = f32(0.0)
    for i in range(row.shape[0]):
        total += row[i] * row[i]
    return total


@compile_loop(fastmath={"reassoc", "contract"})
def _run(inputs: Array, hidden: Array, hidden_bias: Array, output: Array) -> float:
    """The output of a head's network, without its bias."""
    total = 0.0
    for n in range(hidden.shape[0]):
        x = hidden_bias[n]
        for i in range(inputs.shape[0]):
            x += inputs[i] * hidden[n, i]
        total += 0.5 * x * (1.0 + math.tanh(_PER_PI * (x + 0.044715 * x * x * x))) * output[n]
    return total
