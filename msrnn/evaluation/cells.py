"""The cells of a table: who answers, and with how much in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from msrnn.evaluation.store import Row
from msrnn.evaluation.tables import MISSING
from msrnn.policy import FULL, Policy

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
        numbers = None if self.policy in UNBOUNDED else asdict(Policy.parse(self.policy))
        return {"policy": self.policy, "numbers": numbers, "size": self.size}


def stored_cells(rows: Iterable[Row]) -> list[Cell]:
    """The cells of rows, each once; without those whose policy's name means something else now."""
    found: dict[Cell, None] = {}
    for row in rows:
        cell = Cell(row["policy"], row["size"])
        with suppress(ValueError):
            if cell.key["numbers"] == row.get("numbers"):
                found[cell] = None
    return list(found)


class Grid(NamedTuple):
    """Rows are policies, columns sizes. `at` says which cell a place of the table shows."""

    policies: Sequence[str]
    sizes: Sequence[int]
    length: int
    only: frozenset[Cell] | None = None  # the cells that were computed; None: all

    def at(self, name: str, size: int) -> Cell:
        """With as many states as tokens, nothing is ever forgotten."""
        return Cell(FULL, None) if name == FULL or size >= self.length else Cell(name, size)

    def has(self, name: str, size: int) -> bool:
        return self.only is None or self.at(name, size) in self.only

    def sizes_of(self, name: str) -> list[int]:
        """The sizes at which this policy was computed."""
        return [size for size in self.sizes if self.has(name, size)]

    @property
    def places(self) -> list[tuple[str, int]]:
        """Policy and size of each place that shows a cell, row by row."""
        return [(name, size) for name in self.policies for size in self.sizes_of(name)]

    @property
    def cells(self) -> list[Cell]:
        """Each once, the unbounded model first."""
        shown = dict.fromkeys(self.at(name, size) for name, size in self.places)
        return sorted(shown, key=lambda cell: cell.size is not None)

    def beside(self, others: Sequence[Cell]) -> Grid:
        """With more cells: those of earlier commands, after the rows that were asked for."""
        policies = dict.fromkeys([*self.policies, *(cell.policy for cell in others)])
        sizes = {*self.sizes, *(cell.size for cell in others if cell.size is not None)}
        return Grid(list(policies), sorted(sizes), self.length, frozenset([*self.cells, *others]))

    def rows(self, names: Sequence[str], shown: Callable[[str, int], str]) -> list[list[str]]:
        """Of these policies: each one's name, and what is shown at each size."""
        return [
            [name, *(shown(name, size) if self.has(name, size) else MISSING for size in self.sizes)] for name in names
        ]

    @property
    def headers(self) -> list[str]:
        return ["policy", *(f"{size:,}" for size in self.sizes)]


def table(policies: Sequence[str], sizes: Sequence[int], length: int) -> Grid:
    """Each row and each column once, by one name."""
    names = dict.fromkeys(name.lower() if name.lower() in UNBOUNDED else Policy.parse(name).name for name in policies)
    return Grid(list(names), sorted(set(sizes)), length)
