"""What is trained and how: the options of a training, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msrnn.checks import check_count, is_whole
from msrnn.core.change import AHEAD
from msrnn.core.weights_file import WIDEST
from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.size import parse_policy, resolve


@dataclass(frozen=True)
class TrainingPlan:
    """The options of a training.

    policy     the policy that the weights belong to; its importances are those of the bounded model
    sizes      KV rows of each layer; the same networks serve all sizes
    ahead      steps of the future that count; as many tokens are read at once
    length     tokens of a chunk
    chunks     chunks to train on, divided equally among the kinds of text
    held_out   chunks of each kind that are not trained on, for the report
    moments    moments of a chunk, at each size, at which decisions are sampled
    hidden     numbers of a network's hidden layer
    steps      optimizer steps of a round
    rounds     the first round reads with the policy alone, each further one with the weights of the round before
    """

    policy: str = "echo"
    sizes: Sequence[int] = (128, 256)
    ahead: int = AHEAD
    length: int = 2048
    chunks: int = 40
    held_out: int = 4
    moments: int = 6
    hidden: int = 16
    steps: int = 600
    rounds: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))
        for name, of in (
            ("ahead", "steps"),
            ("chunks", "chunks"),
            ("moments", "moments"),
            ("steps", "steps"),
            ("rounds", "rounds"),
        ):
            check_count(name, getattr(self, name), of=of)
        check_count("held_out", self.held_out, of="chunks")
        check_count("hidden", self.hidden, most=WIDEST, of="numbers")
        if not is_whole(self.seed) or not 0 <= self.seed < 2**32:
            raise UsageError(f"must be from 0 to {2**32 - 1}", name="seed", value=self.seed)
        check_policy(self.policy)
        if not self.sizes:
            raise UsageError("empty", name="size", advice="give a number of KV rows")
        for size in self.sizes:
            check_count("size", size, of="KV rows")
            resolve(self.base, size)
            if self.count_candidates(size) < 2:
                raise UsageError(
                    "the policy protects all rows but one, so there is nothing to choose",
                    name="size",
                    value=size,
                    advice="use a larger size",
                )
        least = self.start_of(self.sizes[-1]) + self.ahead
        if not is_whole(self.length) or self.length < least:
            raise UsageError(
                f"must be {least:,} tokens or more: at size {self.sizes[-1]:,} nothing is evicted before, and the "
                f"next {self.ahead:,} steps are what counts",
                name="length",
                value=self.length,
            )

    @property
    def base(self) -> Policy:
        """The policy without weights."""
        return parse_policy(self.policy)[0]

    def name(self, weights: str) -> str:
        """The policy with a file of weights."""
        return replace(self.base, weights=weights).name

    def start_of(self, size: int) -> int:
        """The first moment at which `size` rows are held, a multiple of the tokens that are read at once."""
        return -(-size // self.ahead) * self.ahead

    def moments_of(self, size: int) -> list[int]:
        """Tokens that were read at each possible moment."""
        return list(range(self.start_of(size), self.length - self.ahead + 1, self.ahead))

    def count_candidates(self, size: int) -> int:
        """Held rows that may be evicted when the next token is appended."""
        return size - self.base.first - max(self.base.recent_at(size) - 1, 0)


def check_policy(name: str) -> None:
    """Refuse a policy whose rows have no learned weights."""
    policy, budget = parse_policy(name)
    if budget is not None:
        raise UsageError("has a budget", name="policy", value=name, advice="train with equal sizes: leave it out")
    if policy.learned:
        raise UsageError("has a file already", name="policy", value=name, advice="name the policy without @FILE")
    if not policy.value_norm:
        raise UsageError(
            "does not rank by the norm of values, which learned weights multiply",
            name="policy",
            value=name,
            advice="use echo, or a policy with value_norm=1",
        )
