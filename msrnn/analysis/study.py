"""All that tables and figures are made of: summaries of traces, and what is known of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy

from msrnn.analysis import paper
from msrnn.analysis.measures import Numbers
from msrnn.analysis.summary import Summary, agreement, summarize
from msrnn.analysis.trace_store import Traced
from msrnn.evaluation.statistics import Estimate, mean

Cell = tuple[str, int]  # a policy and a size
Load = Callable[[Cell], Iterable[Traced]]


class Lived(NamedTuple):
    """Tokens that have something in common, such as a tag."""

    name: str
    tokens: int
    mean: dict[Cell, Estimate]  # steps kept


@dataclass(frozen=True)
class Study:
    summaries: dict[Cell, Summary]
    agreements: dict[tuple[str, str, int], float]  # two policies and a size
    ids: Numbers  # [N, T]
    tags: list[list[str]] | None = None  # of each chunk's tokens

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(policy for policy, _ in self.summaries))

    @property
    def sizes(self) -> list[int]:
        return sorted({size for _, size in self.summaries})

    def sizes_of(self, policy: str) -> list[int]:
        """The sizes at which a policy was traced."""
        return sorted(size for name, size in self.summaries if name == policy)

    @property
    def length(self) -> int:
        return int(self.ids.shape[-1])

    @cached_property
    def by_tag(self) -> list[Lived]:
        """All tokens, then the tags of the paper in its order, then others; only those that occur."""
        if self.tags is None:
            return []
        names = numpy.array(self.tags)
        known = [name for name in paper.TAGS if name != paper.ALL]
        others = sorted(set(names.ravel().tolist()) - set(known))
        everything = self._lived(paper.ALL, numpy.ones(names.shape, dtype=bool))
        found = [self._lived(name, names == name) for name in [*known, *others] if (names == name).any()]
        return [everything, *found]

    def by_token(self, at_least: int) -> list[tuple[int, int, dict[Cell, float]]]:
        """Each token's id, how often it occurs (so often or more), and its mean steps kept."""
        tokens, where, count = numpy.unique(self.ids, return_inverse=True, return_counts=True)
        sums = {
            cell: numpy.bincount(where.ravel(), weights=one.life.ravel(), minlength=len(tokens))
            for cell, one in self.summaries.items()
        }
        frequent = numpy.flatnonzero(count >= at_least)
        return [
            (int(tokens[i]), int(count[i]), {cell: float(sums[cell][i] / count[i]) for cell in sums}) for i in frequent
        ]

    def _lived(self, name: str, chosen: Numbers) -> Lived:
        counts = chosen.sum(1)
        some = counts > 0
        means = {
            cell: mean((one.life * chosen).sum(1)[some].tolist(), counts[some].tolist())
            for cell, one in self.summaries.items()
        }
        return Lived(name, int(counts.sum()), means)


def study(cells: Sequence[Cell], load: Load, ids: Numbers, tags: list[list[str]] | None = None) -> Study:
    """`load` gives a cell's traces, in the order of the chunks `ids` [N, T]."""
    summaries = {cell: summarize(*cell, load(cell)) for cell in cells}
    sizes = dict.fromkeys(size for _, size in cells)
    agreements = {
        (one, other, size): agreement(load((one, size)), load((other, size)))
        for size in sizes
        for one, other in combinations([policy for policy, n in cells if n == size], 2)
    }
    return Study(summaries, agreements, numpy.asarray(ids), tags)
