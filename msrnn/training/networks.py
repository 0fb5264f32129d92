"""The networks of many layers at once, as tensors that an optimizer changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from msrnn.core.weight_network import WeightNetwork
from msrnn.core.weights_file import HeadShape
from msrnn.training.decisions import Decisions

LEAST_SCALE = 1e-3  # of inputs: one that hardly varies is not enlarged beyond this
ALPHA = 4.0  # the exponent of the importance is at most this, and at least its inverse
_SAMPLE = 512  # moments that mean and scale are taken from


@dataclass(eq=False)
class Networks:
    """The networks of L layers with K KV heads each. Without training, the output of each is 0."""

    mean: Tensor  # [L, K, I]
    scale: Tensor  # [L, K, I]
    hidden: Tensor  # [L, K, N, I]
    hidden_bias: Tensor  # [L, K, N]
    output: Tensor  # [L, K, N]
    log_alpha: Tensor  # [L]

    @property
    def trained(self) -> list[Tensor]:
        """What an optimizer changes."""
        return [self.hidden, self.hidden_bias, self.output, self.log_alpha]

    @property
    def alpha(self) -> Tensor:
        """[L]"""
        alpha: Tensor = self.log_alpha.clamp(-math.log(ALPHA), math.log(ALPHA)).exp()
        return alpha

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def score(self, decisions: Decisions) -> Tensor:
        """The logarithm of (eviction rank ^ alpha) [N, L, G, C]: the order of the policy with these networks."""
        weights = self.hidden / self.scale[:, :, None]  # so that the many inputs need not be standardised
        bias = self.hidden_bias - (weights @ self.mean[..., None])[..., 0]
        hidden = torch.matmul(decisions.inputs.float(), weights.mT) + bias[:, :, None]
        graded = torch.matmul(gelu(hidden, approximate="tanh"), self.output[..., None])[..., 0]
        g = graded.unflatten(2, (decisions.importance.shape[2], -1)).mean(3)
        score: Tensor = self.alpha[:, None, None] * decisions.importance + decisions.norm + g
        return score

    def layer(self, index: int) -> WeightNetwork:
        """The networks of one layer, as a policy uses them."""
        own: dict[str, Any] = {name: getattr(self, name)[index] for name in ("mean", "scale", "hidden", "hidden_bias")}
        output = self.output[index]
        tensors = {**own, "output": output, "output_bias": output.new_zeros(len(output)), "alpha": self.alpha[index]}
        return WeightNetwork(**{name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})


def make_networks(decisions: Decisions, hidden: int, seed: int) -> Networks:
    """Networks that rank as the policy does without them, for inputs like those of the decisions."""
    _, L, K, _, inputs = decisions.inputs.shape
    device = decisions.inputs.device
    sample = decisions.inputs[:: -(-decisions.moments // _SAMPLE)].float()
    draw = torch.Generator().manual_seed(seed)
    return Networks(
        mean=sample.mean((0, 3)),
        scale=sample.std((0, 3)).clamp(min=LEAST_SCALE),
        hidden=(torch.randn(L, K, hidden, inputs, generator=draw) * inputs**-0.5).to(device),
        hidden_bias=torch.zeros(L, K, hidden, device=device),
        output=torch.zeros(L, K, hidden, device=device),
        log_alpha=torch.zeros(L, device=device),
    )


def make_empty_network(shape: HeadShape) -> WeightNetwork:
    """A network without an effect, for a layer that is not trained."""
    heads, inputs = shape.kv_heads, shape.key_dim + shape.value_dim
    return WeightNetwork(
        mean=torch.zeros(heads, inputs),
        scale=torch.ones(heads, inputs),
        hidden=torch.zeros(heads, 1, inputs),
        hidden_bias=torch.zeros(heads, 1),
        output=torch.zeros(heads, 1),
        output_bias=torch.zeros(heads),
        alpha=torch.ones(()),
    )
