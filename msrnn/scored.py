"""ScoredPolicy: a policy whose importances are computed by a Python function, to try a new idea in ten lines.

It is exact, as every policy is, and slow: the function is called for each token, sequence and group of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from msrnn.errors import UsageError
from msrnn.policy import Policy

if TYPE_CHECKING:
    from torch import Tensor


class Candidates(NamedTuple):
    """The N KV rows of a group of heads as a token is read, the oldest first, the new token last."""

    attention: Tensor  # [query heads of the group, N] float64: the new token's; a head's sum is 1, or less with sinks
    importance: Tensor  # [N] float32: what the function returned for these rows at the token before; 0 for the new one
    keys: Tensor  # [KV heads of the group, N, D], as the model rotated them
    values: Tensor  # [KV heads of the group, N, Dv]
    positions: Tensor  # [N] int64: the position of each row in its text, ascending


Score = Callable[[Candidates], "Tensor"]


@dataclass(frozen=True)
class ScoredPolicy(Policy):
    """A policy that evicts the KV row with the least `score(candidates)`, [N], among those that are not protected.

    Only the torch backend computes it. Its states can be forked and selected, but not saved: a file cannot hold a
    function. Ties evict the oldest KV row, and a score that is NaN counts as infinity, as for every policy.
    """

    decay: float | None = field(default=1.0, init=False)  # the slots keep an importance for each row
    value_norm: bool = field(default=False, init=False)
    weights: str | None = field(default=None, init=False)
    score: Score = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.score):
            raise UsageError(
                "must be a function of the candidates that returns a tensor", name="score", value=self.score
            )

    @property
    def name(self) -> str:
        """The name of the function and its identity in this process: another function is another policy."""
        function = getattr(self.score, "__qualname__", type(self.score).__qualname__)
        horizon = "" if self.horizon is None else f",horizon={self.horizon}"
        rest = f"per={self.per},first={self.first},recent={self.recent}{horizon}"
        return f"score={function}@{id(self.score):x},{rest}"

    @property
    def numbers(self) -> dict[str, Any]:
        raise UsageError(
            f"policy {self.name!r}: results under a Python function cannot be stored, since no file says which "
            "function it was; keep them yourself, or use a policy with a name"
        )


def refuse_scored(policy: Policy, reason: str) -> None:
    """Refuse a policy with a Python function where it cannot work."""
    if isinstance(policy, ScoredPolicy):
        raise UsageError(f"policy {policy.name!r}: {reason}")
