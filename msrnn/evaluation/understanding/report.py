"""The answers as figures: scores, and differences between policies on the same questions."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msrnn.evaluation import statistics
from msrnn.evaluation.cells import Cell, Grid
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.tables import MISSING, estimated, markdown_list, markdown_table
from msrnn.evaluation.understanding.records import Asked, Records
from msrnn.evaluation.understanding.scores import Scores
from msrnn.evaluation.understanding.tasks import Task

Show = Callable[[Estimate], str]


@dataclass(frozen=True)
class Report:
    """Of the questions with these keys, all of which every cell of the grid has answered."""

    task: Task
    grid: Grid
    records: Records
    keys: list[str]
    against: str  # the policy that others are compared with, at the same size
    scores: Scores

    @cached_property
    def asked(self) -> list[Asked]:
        return [self.records.asked[key] for key in self.keys]

    def _columns(self, cell: Cell) -> list[list[float]]:
        """For each document, the sums of each part over its questions; and last, how many these are."""
        documents: dict[str, list[list[float]]] = {}
        for asked, score in zip(self.asked, self.scores[cell], strict=True):
            documents.setdefault(asked.document, []).append([*score.values, 1.0])
        sums = [[sum(part) for part in zip(*found, strict=True)] for found in documents.values()]
        return [list(column) for column in zip(*sums, strict=True)]

    def _overall(self, sums: Sequence[Any]) -> Any:
        return self.task.metric.overall([total / sums[-1] for total in sums[:-1]])

    @cached_property
    def _estimates(self) -> dict[Cell, Estimate]:
        return {cell: statistics.bootstrap(self._columns(cell), self._overall) for cell in self.grid.cells}

    def score(self, name: str, size: int) -> Estimate:
        return self._estimates[self.grid.at(name, size)]

    def parts(self, name: str, size: int) -> list[float]:
        *sums, counts = self._columns(self.grid.at(name, size))
        return [sum(column) / sum(counts) for column in sums]

    def difference(self, name: str, size: int) -> Estimate | None:
        """Points more than the policy compared with; None: it is the same cell."""
        return self._differences.get((self.grid.at(name, size), self.grid.at(self.against, size)))

    @cached_property
    def _differences(self) -> dict[tuple[Cell, Cell], Estimate]:
        width = len(self.task.metric.parts) + 1
        found = {}
        for name, size in self.grid.places:
            cell, other = self.grid.at(name, size), self.grid.at(self.against, size)
            if cell != other and name != self.against and self.grid.has(self.against, size):
                columns = [*self._columns(cell), *self._columns(other)]
                found[cell, other] = statistics.bootstrap(
                    columns, lambda sums: self._overall(sums[:width]) - self._overall(sums[width:])
                )
        return found

    @property
    def compared(self) -> list[str]:
        """The other policies that were computed at a size of the one compared with."""
        sizes = set(self.grid.sizes_of(self.against))
        return [name for name in self.grid.policies if name != self.against and sizes & set(self.grid.sizes_of(name))]

    def kinds(self, name: str, size: int) -> dict[str, list[float]]:
        """First parts by the kind of the nearest reference."""
        found: dict[str, list[float]] = {}
        for score in self.scores[self.grid.at(name, size)]:
            if score.kind:
                found.setdefault(score.kind, []).append(score.values[0])
        return found

    def table(self, show: Show) -> list[list[str]]:
        """A row for each policy: its name, and each size's score."""
        return self.grid.rows(self.grid.policies, lambda name, size: show(self.score(name, size)))

    def differences(self, show: Show) -> list[list[str]]:
        """A row for each other policy: its name, and each size's difference."""
        return self.grid.rows(
            self.compared, lambda name, size: show(one) if (one := self.difference(name, size)) else MISSING
        )

    def told(self) -> str:
        """The questions, and what of their documents was read."""
        cuts = [asked.prompts[self.records.exam.length] for asked in self.asked]
        tokens, cut = sum(told[1] for told in cuts), sum(told[2] for told in cuts)
        shorter = sum(told[2] > 0 for told in cuts)
        return (
            f"{len(self.asked):,} on {len({asked.document for asked in self.asked}):,} documents; "
            f"prompts of {tokens / len(cuts):,.0f} tokens on average; "
            f"{cut / len(cuts):,.0f} tokens of the document cut on average, in {shorter:,} of them"
        )


def shown(estimate: Estimate, between: str = "\n", sign: str = "") -> str:
    """A score or a difference, and its interval."""
    return estimated(estimate, lambda x: f"{x:{sign}.2f}", between)


def markdown(report: Report, title: str, told: dict[str, str]) -> str:
    """All tables, and below them what they were computed with."""
    about = f"{title}. {report.task.metric.name}; beside each value its 95 % interval, by bootstrap over the documents."
    parts = [f"# {report.task.title}\n\n{about}\n"]
    parts.append(markdown_table(report.grid.headers, report.table(lambda x: shown(x, " · "))))
    if report.compared:
        parts.append(f"Points against {report.against} at the same size, on the same questions.\n")
        parts.append(markdown_table(report.grid.headers, report.differences(lambda x: shown(x, " · ", "+"))))
    if kinds := _kinds(report):
        parts.append("By the kind of the nearest answer, and how many these are.\n")
        parts.append(markdown_table(["", *kinds], _kind_rows(report, kinds)))
    return "\n".join([*parts, markdown_list({"questions": report.told(), **told})])


def _kinds(report: Report) -> list[str]:
    return sorted({kind for place in report.grid.places for kind in report.kinds(*place)})


def _kind_rows(report: Report, kinds: list[str]) -> list[list[str]]:
    rows = {}
    for name, size in report.grid.places:
        found = report.kinds(name, size)
        values = [f"{sum(x) / len(x):.2f} · {len(x)}" if (x := found.get(kind)) else MISSING for kind in kinds]
        rows[report.grid.at(name, size).label] = values
    return [[label, *values] for label, values in rows.items()]


def as_csv(report: Report) -> str:
    """A line for each place of the tables, in full precision."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = "policy", "size", "score", "low", "high", *report.task.metric.parts, "questions"
    writer.writerow([*names, "against", "difference", "difference_low", "difference_high"])
    for name, size in report.grid.places:
        difference = report.difference(name, size)
        compared = [report.against, *difference] if difference else [""] * 4
        line = [name, size, *report.score(name, size), *report.parts(name, size), len(report.asked), *compared]
        writer.writerow(line)
    return file.getvalue()
