"""A study: the traces of all policies, sizes and chunks, computed and summarized for tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from transformers import PreTrainedModel

from msrnn.analysis.summary import Numbers, Summary, agreement, summarize
from msrnn.analysis.trace import TraceStore, find_traced_cells
from msrnn.errors import UsageError
from msrnn.evaluation.statistics import Estimate, mean
from msrnn.hf.trace import ChunkTrace

Cell = tuple[str, int]  # a policy and a size
Load = Callable[[Cell], Iterable[ChunkTrace]]

# The paper's results for TOVA on LLaMA-2-7B, on 31 chunks of 4,096 tokens of PG-19.
PAPER_POLICY, PAPER_SIZES = "tova", (256, 512, 1024, 2048)
PAPER_POSITIONS = 25
PAPER_RECENT = (0.73, 0.76)  # the share of kept KV rows that are recent: the lowest and the highest over its sizes
ALL = "all"  # tokens, of any tag

# Mean steps kept by part of speech, at each of the sizes, in the paper's order.
PAPER_TAGS: dict[str, tuple[int, int, int, int]] = {
    ALL: (249, 481, 897, 1537),
    "POS": (1134, 1393, 1736, 2061),
    "''": (845, 1101, 1413, 1774),
    "$": (329, 724, 1276, 2123),
    ")": (379, 670, 1161, 1558),
    ".": (350, 645, 1117, 1677),
    "NNPS": (321, 578, 1042, 1671),
    "newline": (303, 550, 969, 1538),
    "WP$": (255, 539, 1121, 1920),
    "CD": (301, 537, 940, 1557),
    "NN": (270, 527, 983, 1628),
    "NNS": (270, 526, 978, 1618),
    "NNP": (270, 517, 951, 1613),
    "FW": (253, 511, 903, 1444),
    ":": (243, 492, 940, 1570),
    "JJ": (240, 480, 918, 1598),
    "VBP": (244, 478, 882, 1504),
    "JJS": (220, 475, 953, 1689),
    "UH": (233, 474, 870, 1412),
    "SYM": (231, 471, 893, 1482),
    "WDT": (223, 462, 903, 1604),
    "VBN": (230, 462, 887, 1549),
    "EX": (244, 461, 847, 1461),
    "RB": (223, 459, 892, 1566),
    ",": (236, 453, 840, 1454),
    "VBG": (221, 445, 858, 1523),
    "RBS": (210, 441, 878, 1645),
    "VBZ": (219, 440, 844, 1492),
    "CC": (217, 437, 862, 1546),
    "VBD": (217, 432, 827, 1493),
    "VB": (214, 426, 817, 1457),
    "PRP": (217, 424, 794, 1432),
    "RP": (207, 417, 811, 1485),
    "WRB": (207, 415, 800, 1502),
    "WP": (199, 405, 803, 1506),
    "JJR": (195, 403, 782, 1413),
    "RBR": (183, 397, 821, 1566),
    "PDT": (181, 391, 756, 1362),
    "IN": (190, 385, 760, 1408),
    "PRP$": (189, 383, 745, 1386),
    "DT": (190, 379, 734, 1363),
    "MD": (177, 378, 754, 1392),
    "TO": (182, 368, 734, 1363),
}


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
        known = [name for name in PAPER_TAGS if name != ALL]
        others = sorted(set(names.ravel().tolist()) - set(known))
        everything = self._lifetime(ALL, numpy.ones(names.shape, dtype=bool))
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
    for cell in find_traced_cells(folder):
        if cell not in stores and cell[1] + 1 < ids.shape[1]:
            with suppress(UsageError):  # its file of weights is gone, or is another model's
                earlier = TraceStore(folder, model, *cell, beside)
                if not earlier.missing(ids):
                    stores[cell] = earlier

    def load(cell: Cell) -> Iterator[ChunkTrace]:
        return (stores[cell].load(row) for row in ids)

    return study(list(stores), load, ids, tags)
