from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from msrnn import MultiStateRNN
from msrnn.core.weights_file import HeadShape
from msrnn.policy import Policy
from msrnn.training.collect import collect_decisions, find_stacks
from msrnn.training.decisions import Decisions
from msrnn.training.networks import Networks, make_empty_network, make_networks
from tests.helpers.tiny import tokens

POLICIES = {"layer": Policy.parse("echo"), "head": Policy(0.9, "head", 0, 5, True)}

AHEAD = 64


def collect(model: PreTrainedModel, policy: Policy) -> Decisions:
    rnn = MultiStateRNN(model, policy, 24)
    return collect_decisions(rnn, find_stacks(rnn.spec), tokens(3, 3 * AHEAD), [AHEAD, 2 * AHEAD], AHEAD)[0]


def randomize(networks: Networks) -> Networks:
    draw = torch.Generator().manual_seed(3)
    for tensor in networks.trained:
        tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.5)
    return networks


@pytest.mark.parametrize("per", POLICIES)
def test_untrained_networks_rank_as_the_policy(per: str, model: PreTrainedModel) -> None:
    decisions = collect(model, POLICIES[per])
    score = make_networks(decisions, 4, 0).score(decisions)
    assert torch.equal(score, decisions.importance + decisions.norm)


@pytest.mark.parametrize("per", POLICIES)
def test_the_score_is_the_rank_of_the_package(per: str, model: PreTrainedModel) -> None:
    """log(importance * weight) * alpha, with the weight that slots store; heads of a group together."""
    decisions = collect(model, POLICIES[per])
    networks = randomize(make_networks(decisions, 4, 0))
    score, groups = networks.score(decisions), decisions.importance.shape[2]
    for layer in range(2):
        network = networks.layer(layer)
        inputs = decisions.inputs[:, layer].float()
        key, value = inputs.split(inputs.shape[-1] // 2, -1)
        position = torch.zeros(1, 1, 1, dtype=torch.int32)
        graded = network.grade(key, value, position)  # keys are not rotated any more
        weight = network.combine(graded, value, groups, None)
        rank = (decisions.importance[:, layer] + weight.log()) * network.alpha
        torch.testing.assert_close(score[:, layer], rank, atol=2e-3, rtol=1e-3)


def test_the_score_has_gradients_like_finite_differences(model: PreTrainedModel) -> None:
    decisions = collect(model, POLICIES["layer"])
    networks = randomize(make_networks(decisions, 4, 0))
    for name in ("hidden", "output", "log_alpha"):
        tensor = getattr(networks, name).requires_grad_()
        (gradient,) = torch.autograd.grad(networks.score(decisions).square().mean(), tensor)
        direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))

        def moved(by: float, tensor: torch.Tensor = tensor, name: str = name) -> torch.Tensor:
            return replace(networks, **{name: tensor.detach() + by}).score(decisions).square().mean()

        expected = (moved(1e-2 * direction) - moved(-1e-2 * direction)) / 2e-2  # type: ignore[arg-type]
        torch.testing.assert_close((gradient * direction).sum(), expected, rtol=0.03, atol=1e-2)
        tensor.requires_grad_(False)


def test_an_empty_network_has_no_effect() -> None:
    network = make_empty_network(HeadShape(2, 3, 4))
    assert not network.grade(torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 4), torch.zeros(1, 1, 5)).any()
