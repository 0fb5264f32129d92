"""Tables of `ChatMemory`: scores by category, and paired differences between versions of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msrnn.evaluation import statistics
from msrnn.evaluation.cells import FULL_MODEL, Cell
from msrnn.evaluation.data.conversations import ADVERSARIAL, CATEGORIES
from msrnn.evaluation.report import Formatted, Table, document
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.tasks.chat_memory import NAME, Results

ANSWERABLE, ALL = "answerable", "all"  # all categories but adversarial, and all


@dataclass(frozen=True)
class Report:
    """Mean scores from 0 to 1, with their 95 % confidence intervals."""

    results: Results
    categories: Sequence[int]  # of each question

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """The numbers of the questions of each column; a category without a question has no column."""
        found = {
            name: [i for i, own in enumerate(self.categories) if own == number] for number, name in CATEGORIES.items()
        }
        groups = {name: some for name, some in found.items() if some}
        if ADVERSARIAL in self.categories and len(groups) > 1:
            groups[ANSWERABLE] = [i for i, own in enumerate(self.categories) if own != ADVERSARIAL]
        return {**groups, ALL: list(range(len(self.categories)))}

    def score(self, cell: Cell, group: str = ALL) -> Estimate:
        """The mean score of a category, or of "answerable" or "all" questions."""
        return self._mean(group, lambda i: self.results[cell][i])

    def difference(self, cell: Cell, other: Cell, group: str = ALL) -> Estimate:
        """The paired difference of two mean scores on the same questions."""
        return self._mean(group, lambda i: self.results[cell][i] - self.results[other][i])

    def _mean(self, group: str, value: Callable[[int], float]) -> Estimate:
        values = [value(i) for i in self.groups[group]]
        return statistics.mean(values, [1] * len(values))

    @cached_property
    def pairs(self) -> list[tuple[Cell, Cell]]:
        """Each version with recall and the same without, then each version and the full model."""
        recalling = [(cell, cell.without_recall) for cell in self.results if cell.recalled]
        bounded = [(cell, FULL_MODEL) for cell in self.results if cell != FULL_MODEL]
        return [(cell, other) for cell, other in recalling + bounded if other in self.results]

    def tables(self, title: str) -> list[Table]:
        header = ["version", *(f"{name} (n = {len(some):,})" for name, some in self.groups.items())]
        about = f"answers about conversations by category: {title}"
        rows: list[list[Any]] = [
            [cell.label, *(Formatted(self.score(cell, group), "{:.1%}".format) for group in self.groups)]
            for cell in self.results
        ]
        tables = [Table(NAME, about, "Mean F1; adversarial: the share of right answers.", header, rows, self._lines())]
        if self.pairs:
            rows = [
                [
                    f"{cell.label} against {other.label}",
                    *(Formatted(self.difference(cell, other, group), "{:+.1%}".format) for group in self.groups),
                ]
                for cell, other in self.pairs
            ]
            about = "paired differences on the same questions"
            tables.append(Table("", about, f"{about.capitalize()}.", header, rows))
        return tables

    def _lines(self) -> list[Sequence[Any]]:
        lines: list[Sequence[Any]] = [["policy", "size", "category", "f1", "low", "high", "questions"]]
        for cell in self.results:
            lines += [[*cell, group, *self.score(cell, group), len(some)] for group, some in self.groups.items()]
        return lines

    def markdown(self, title: str, facts: dict[str, Any]) -> str:
        about = (
            f"{title}. Each conversation is read once, and each question is asked from a copy of the state. Scores are "
            "those of LoCoMo (arXiv:2402.17753): F1 of stemmed words; of multi-hop answers, by parts. Intervals are "
            "95 %, by bootstrap over the questions. Answerable: all questions but the adversarial ones, which a model "
            "that remembers nothing can answer."
        )
        return document("Chat memory", about, self.tables(title), facts)
