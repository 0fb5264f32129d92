from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from msrnn.training import fit
from msrnn.training.decisions import Decisions
from msrnn.training.fit import compute_references, find_rate, fit_networks
from msrnn.training.networks import Networks, make_networks
from msrnn.training.summary import measure_lost


def make_decisions(seed: int, moments: int = 40) -> Decisions:
    """The future depends on the inputs, of which the importance knows nothing."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(moments, 2, 2, 24, 6, generator=draw).half()
    importance, norm = (torch.randn(moments, 2, 1, 24, generator=draw) * 0.3 for _ in range(2))
    known = inputs.float()[..., 0].mean(2, keepdim=True)
    return Decisions(inputs, importance, norm, (importance + norm + 2 * known).exp())


@pytest.fixture(scope="module")
def decisions() -> list[Decisions]:
    return [make_decisions(0), make_decisions(1)]


@pytest.fixture
def networks(decisions: list[Decisions]) -> Networks:
    return make_networks(decisions[0], 4, 0)


def test_less_is_lost_on_other_texts(decisions: list[Decisions], networks: Networks) -> None:
    fit_networks(networks, decisions, 150, 0)
    lost = measure_lost([networks], [make_decisions(2)])
    assert lost.future < lost.weights < lost.policy
    assert lost.closed > 0.5


def test_an_interrupted_training_continues_to_the_same_result(
    decisions: list[Decisions], networks: Networks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "CHECKPOINT", 5)
    again, checkpoint = deepcopy(networks), tmp_path / "networks.pt"
    fit_networks(networks, decisions, 12, 0)

    def stop(_: int) -> None:
        if checkpoint.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_networks(again, decisions, 12, 0, checkpoint, stop)
    fresh, steps = make_networks(decisions[0], 4, 5), list[int]()
    fit_networks(fresh, decisions, 12, 0, checkpoint, steps.append)
    assert steps == [5, *[1] * 7]
    for one, other in zip(fresh.tensors().values(), networks.tensors().values(), strict=True):
        assert torch.equal(one, other)


def test_a_damaged_checkpoint_is_not_used(decisions: list[Decisions], networks: Networks, tmp_path: Path) -> None:
    checkpoint, steps = tmp_path / "networks.pt", list[int]()
    checkpoint.write_bytes(b"PK")
    fit_networks(networks, decisions, 3, 0, checkpoint, steps.append)
    assert steps == [0, 1, 1, 1]


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [find_rate(step, 100) for step in range(100)]
    assert max(rates[:20]) == rates[19] == max(rates)
    assert rates[0] < 0.1
    assert rates[-1] < 0.01


def test_references_are_what_the_policy_loses(decisions: list[Decisions]) -> None:
    for reference in compute_references(decisions[0]):
        assert reference.shape == (2,)
        assert (reference > 0).all()
