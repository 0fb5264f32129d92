"""What trained weights lose on chunks that they were not trained on, beside the policy and the true future."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msrnn.evaluation.report import Table
from msrnn.training.decisions import Decisions, Stacks
from msrnn.training.losses import sum_lost
from msrnn.training.networks import Networks

EVICTED = 4  # one candidate in four is evicted


class Lost(NamedTuple):
    """The share of the future change of all candidates that is lost with the evicted quarter; a mean over layers."""

    policy: float  # without weights
    weights: float
    future: float  # evicted by the future itself: nothing loses less

    @property
    def closed(self) -> float:
        """The part of the way from the policy to the future that the weights go."""
        way = self.policy - self.future
        return (self.policy - self.weights) / way if way > 0 else 0.0


@torch.no_grad()
def measure_lost(networks: Sequence[Networks], stacks: Stacks) -> Lost:
    """The shares on the decisions of all layers, at one size."""
    shares = torch.cat([_shares_of(one, decisions) for one, decisions in zip(networks, stacks, strict=True)], 1)
    return Lost(*shares.mean(1).tolist())


def _shares_of(networks: Networks, decisions: Decisions) -> Tensor:
    """[3, L]: by the policy, by the weights, by the future."""
    change = decisions.change
    evicted = max(1, change.shape[-1] // EVICTED)
    scores = decisions.importance + decisions.norm, networks.score(decisions), change
    total = change.sum((0, 2, 3)).clamp(min=1e-30)
    return torch.stack([sum_lost(score, change, evicted).sum((0, 2)) / total for score in scores]).double().cpu()


Results = Mapping[str, Mapping[int, Lost]]  # by the kind of text, and the size


def make_table(results: Results, policy: str) -> Table:
    """A table with one line for each kind of text and size."""
    header = ["text, size", policy, "with weights", "true future", "of the way"]
    lines = [(f"{kind}, {size:,}", lost) for kind, sizes in results.items() for size, lost in sizes.items()]
    rows = [[label, *(f"{share:.4f}" for share in lost), f"{lost.closed:.0%}"] for label, lost in lines]
    title = "share of the future change of outputs that is lost, on chunks that were not trained on"
    return Table("weights", title, "", header, rows, [])


def describe(results: Results) -> dict[str, Any]:
    """The same as plain values."""
    return {kind: {str(size): lost._asdict() for size, lost in sizes.items()} for kind, sizes in results.items()}
