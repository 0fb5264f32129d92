"""Learned row weights: what a small network of each KV head says of a row, from its key and its value.

The weight of a row is (|v| exp g)^(1 / alpha), where g is the network's output: to rank by importance times this weight
is to rank by importance^alpha |v| exp g. The network has one hidden layer. It sees the value, and the key as it was
before its rotation, so that the weight does not depend on the position.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from msrnn.core.quantization import Rows
from msrnn.core.rope import Rope
from msrnn.core.row_weights import sum_squares
from msrnn.core.shards import Shards

MOST_DEVIATION = 100.0  # of an input from its mean, in units of its scale: farther ones count as this far
MOST_EXPONENT = 20.0  # of weights: importances times them stay within the range of float32, in every backend
PARAMETERS = ("mean", "scale", "hidden", "hidden_bias", "output", "output_bias", "alpha")


def network_inputs(key: Tensor, value: Tensor, position: Tensor, rope: Rope | None) -> Tensor:
    """What a network sees [B, K, C, I] float32: the key before its rotation, and the value, of rows at position."""
    key = key.float()
    if rope is not None:
        key = rope.rotate(key, rope.angle(position, torch.zeros_like(position)))
    return torch.cat([key, value.float()], dim=-1)


@dataclass(frozen=True, eq=False)
class WeightNetwork:
    """The networks of all KV heads of one layer, those of other processes included; float32.

    I inputs of a head are the D numbers of its key and the Dv numbers of its value, N is the width of the hidden layer.
    """

    mean: Tensor  # [K, I], of the inputs
    scale: Tensor  # [K, I]
    hidden: Tensor  # [K, N, I]
    hidden_bias: Tensor  # [K, N]
    output: Tensor  # [K, N]
    output_bias: Tensor  # [K]
    alpha: Tensor  # []
    rope: Rope | None = None  # how the model has rotated the keys; None: it has not
    _copies: dict[torch.device, WeightNetwork] = field(default_factory=dict, repr=False)  # on other devices

    def __deepcopy__(self, _: dict[int, Any]) -> WeightNetwork:
        return self

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in PARAMETERS}

    def on(self, device: torch.device) -> WeightNetwork:
        """The same network on a device; copied once."""
        if device == self.mean.device:
            return self
        if device not in self._copies:
            rope = self.rope and replace(self.rope, frequency=self.rope.frequency.to(device))
            moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
            self._copies[device] = WeightNetwork(**moved, rope=rope)
        return self._copies[device]

    def of(self, shards: Shards | None) -> WeightNetwork:
        """The networks of the KV heads of one process; views."""
        if shards is None:
            return self
        parts = {name: tensor.chunk(shards.count) for name, tensor in self.tensors().items() if tensor.ndim}
        own: dict[str, Any] = {name: of_ranks[shards.rank] for name, of_ranks in parts.items()}
        return replace(self, **own, _copies={})

    def grade(self, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        """The output g [B, K, C] of each head's network for rows [B, K, C, D] at position [B, 1 or K, C]."""
        inputs = network_inputs(key, value, position, self.rope)
        inputs = (inputs - self.mean[:, None]) / self.scale[:, None]
        inputs = inputs.clamp(-MOST_DEVIATION, MOST_DEVIATION)
        # In float64: a product of float32 matrices may be rounded to TF32 on a GPU, which no other backend does.
        with torch.autocast(inputs.device.type, enabled=False):
            hidden = torch.matmul(inputs.double(), self.hidden.double().mT) + self.hidden_bias[:, None]
            products = torch.matmul(gelu(hidden, approximate="tanh"), self.output.double()[..., None])[..., 0]
            return (products + self.output_bias[:, None]).float()

    def weigh(
        self, key: Rows, value: Rows, position: Tensor, groups: int, shards: Shards | None, joint: Shards | None
    ) -> Tensor:
        """The weights [B, G, C] float32 of rows [B, K, C, D] at position [B, 1 or G, C].

        A group of several heads has the mean of their g, and the norm of all its values; `joint` are the processes that
        share a group, `shards` those that share the layer.
        """
        keys, values, heads = key.dequantized(torch.float32), value.dequantized(torch.float32), key.codes.shape[1]
        if position.shape[1] > 1:
            position = position.repeat_interleave(heads // groups, 1)
        network = self.on(position.device)
        graded = network.of(shards).grade(keys, values, position)
        return network.combine(graded, values, groups, joint)

    def combine(self, graded: Tensor, values: Tensor, groups: int, joint: Shards | None) -> Tensor:
        """The weights [B, G, C] of rows, from g [B, K, C] and their values [B, K, C, Dv].

        A row whose value is zero has the least weight. NaN stays NaN, and such a row is evicted last.
        """
        sums = torch.stack([sum_squares(values, groups), graded.unflatten(1, (groups, -1)).sum(2)])
        members = graded.shape[1] // groups
        if joint is not None:
            sums, members = joint.sum(sums), members * joint.count
        exponent = (0.5 * sums[0].log() + sums[1] / members) / self.alpha
        return exponent.clamp(-MOST_EXPONENT, MOST_EXPONENT).exp()
