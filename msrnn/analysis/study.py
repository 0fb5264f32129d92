"""A study: the traces of all policies, sizes and chunks, computed and summarized for tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from transformers import PreTrainedModel

from msrnn.analysis import paper
from msrnn.analysis.summary import Numbers, Summary, agreement, summarize
from msrnn.analysis.trace import ChunkTrace, TraceStore, stored_cells
from msrnn.evaluation.statistics import Estimate, mean

Cell = tuple[str, int]  # a policy and a size
Load = Callable[[Cell], Iterable[ChunkTrace]]


class TagLifetime(NamedTuple):
    """How long the tokens with one tag are kept."""

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
    def by_tag(self) -> list[TagLifetime]:
        """All tokens, then the tags of the paper in its order, then other tags; only those that occur."""
        if self.tags is None:
            return []
        names = numpy.array(self.tags)
        known = [name for name in paper.TAGS if name != paper.ALL]
        others = sorted(set(names.ravel().tolist()) - set(known))
        everything = self._lifetime(paper.ALL, numpy.ones(names.shape, dtype=bool))
        lifetimes = [self._lifetime(name, names == name) for name in [*known, *others] if (names == name).any()]
        return [everything, *lifetimes]

    def by_token(self, at_least: int) -> list[tuple[int, int, dict[Cell, float]]]:
        """The id, the number of occurrences (`at_least` or more) and the mean steps kept of each token id."""
        tokens, where, count = numpy.unique(self.ids, return_inverse=True, return_counts=True)
        sums = {
            cell: numpy.bincount(where.ravel(), weights=one.life.ravel(), minlength=len(tokens))
            for cell, one in self.summaries.items()
        }
        frequent = numpy.flatnonzero(count >= at_least)
        return [
            (int(tokens[i]), int(count[i]), {cell: float(sums[cell][i] / count[i]) for cell in sums}) for i in frequent
        ]

    def _lifetime(self, name: str, chosen: Numbers) -> TagLifetime:
        counts = chosen.sum(1)
        some = counts > 0
        means = {
            cell: mean((one.life * chosen).sum(1)[some].tolist(), counts[some].tolist())
            for cell, one in self.summaries.items()
        }
        return TagLifetime(name, int(counts.sum()), means)


def study(cells: Sequence[Cell], load: Load, ids: Numbers, tags: list[list[str]] | None = None) -> Study:
    """Summarize traces. `load` gives those of a cell, in the order of the chunks `ids` [N, T]."""
    summaries = {cell: summarize(*cell, load(cell)) for cell in cells}
    sizes = dict.fromkeys(size for _, size in cells)
    agreements = {
        (one, other, size): agreement(load((one, size)), load((other, size)))
        for size in sizes
        for one, other in combinations([policy for policy, n in cells if n == size], 2)
    }
    return Study(summaries, agreements, numpy.asarray(ids), tags)


class StudyProgress(NamedTuple):
    """Callbacks for progress."""

    on_start: Callable[[int, int], object]  # the traces that exist already, and all traces
    on_cell: Callable[[str], object]  # the label of the policy and size that is traced next
    on_tokens: Callable[[int], object]  # tokens read since the last call


def run_study(
    model: PreTrainedModel,
    ids: Numbers,
    cells: Sequence[Cell],
    folder: Path,
    batch: int,
    beside: dict[str, Any],
    tags: list[list[str]] | None,
    progress: StudyProgress,
) -> Study:
    """Trace the chunks `ids` [N, T] under each policy and size, and summarize.

    Traces that the folder has are not computed again. The study includes policies and sizes of earlier runs that have
    a trace of each of these chunks.
    """
    stores = {cell: TraceStore(folder, model, *cell, beside) for cell in cells}
    total = len(stores) * len(ids)
    progress.on_start(total - sum(len(store.missing(ids)) for store in stores.values()), total)
    for store in stores.values():
        if store.missing(ids):
            progress.on_cell(store.label)
            store.fill(ids, batch, progress.on_tokens)
    for cell in stored_cells(folder):
        if cell not in stores and cell[1] + 1 < ids.shape[1]:
            earlier = TraceStore(folder, model, *cell, beside)
            if not earlier.missing(ids):
                stores[cell] = earlier

    def load(cell: Cell) -> Iterator[ChunkTrace]:
        return (stores[cell].load(row) for row in ids)

    return study(list(stores), load, ids, tags)
