"""The cells of a table: who answers, and with how much in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from msrnn.policy import FULL, policy

BASELINE = "baseline"  # the unbounded model on pieces of `size` tokens
TRUNCATED = "truncated"  # the unbounded model on the first `size` tokens
UNBOUNDED = (FULL, BASELINE, TRUNCATED)


class Cell(NamedTuple):
    policy: str
    size: int | None  # None: full, which has no limit

    @property
    def label(self) -> str:
        return self.policy if self.size is None else f"{self.policy} {self.size}"

    @property
    def key(self) -> dict[str, Any]:
        """What a result depends on: a policy's numbers and not its name alone, which may come to mean others."""
        numbers = None if self.policy in UNBOUNDED else asdict(policy(self.policy))
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

    def rows(self, names: Sequence[str], shown: Callable[[str, int], str]) -> list[list[str]]:
        """Of these policies: each one's name, and what is shown at each size."""
        return [[name, *(shown(name, size) for size in self.sizes)] for name in names]

    @property
    def headers(self) -> list[str]:
        return ["policy", *(f"{size:,}" for size in self.sizes)]


def table(policies: Sequence[str], sizes: Sequence[int], length: int) -> Grid:
    """Each row and each column once, by one name."""
    names = dict.fromkeys(name if name in UNBOUNDED else policy(name).name for name in policies)
    return Grid(list(names), sorted(set(sizes)), length)
