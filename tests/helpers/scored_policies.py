"""Built-in policies that are written as Python functions."""

from __future__ import annotations

from torch import Tensor

from msrnn.policy import Policy
from msrnn.scored import Candidates, ScoredPolicy


def as_function(policy: Policy) -> ScoredPolicy:
    """A built-in policy, its importances computed by a function that is written for it."""

    def score(seen: Candidates) -> Tensor:
        if policy.decay is None:
            return seen.positions
        # What is remembered is the rank: the norm is a factor of it.
        norm = seen.values.float().square().sum((0, 2)).sqrt() if policy.value_norm else 1.0
        return (policy.decay * seen.importance / norm + seen.attention.mean(0)) * norm

    return ScoredPolicy(policy.per, policy.first, policy.recent, policy.horizon, score=score)
