"""The cells of the table: who predicts, and with how much in memory. Every one predicts the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from msrnn.policy import FULL, policy, resolve

BASELINE = "baseline"  # the unbounded model on pieces of `size` tokens
PAPER_ROWS = (
    BASELINE,
    "window",
    "window+1",
    "window+4",
    "h2o",
    "h2o-layer",
    "tova-head",
    "tova",
    "tova+1",
    "tova+4",
)
PAPER_SIZES = tuple(2**i for i in range(6, 13))


class Cell(NamedTuple):
    policy: str
    size: int | None  # None: full, which has no limit

    @property
    def label(self) -> str:
        return self.policy if self.size is None else f"{self.policy} {self.size}"

    @property
    def key(self) -> dict[str, Any]:
        """What a result depends on: a policy's numbers and not its name alone, which may come to mean others."""
        numbers = None if self.policy in (FULL, BASELINE) else asdict(policy(self.policy))
        return {"policy": self.policy, "numbers": numbers, "size": self.size}


class Grid(NamedTuple):
    """Rows are policies, columns sizes. `at` says which cell a place of the table shows."""

    policies: Sequence[str]
    sizes: Sequence[int]
    length: int

    def at(self, name: str, size: int) -> Cell:
        """With as many states as tokens, nothing is ever forgotten."""
        return Cell(FULL, None) if name == FULL or size >= self.length else Cell(name, size)

    @property
    def cells(self) -> list[Cell]:
        """Each once, the unbounded model first."""
        shown = dict.fromkeys(self.at(name, size) for name in self.policies for size in self.sizes)
        return sorted(shown, key=lambda cell: cell.size is not None)


def grid(policies: Sequence[str], sizes: Sequence[int], length: int) -> Grid:
    """A table that can be computed; refuses what cannot."""
    for name in policies:
        for size in sizes:
            _check(name, size)
    names = dict.fromkeys(name if name in (FULL, BASELINE) else policy(name).name for name in policies)
    return Grid(list(names), sorted(set(sizes)), length)


def _check(name: str, size: int) -> None:
    if name != BASELINE:
        resolve(name, size)
    elif size < 2:
        raise ValueError(f"--size {size}: a piece of the baseline must have 2 tokens or more, to predict one")
