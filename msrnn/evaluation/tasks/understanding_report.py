"""Scores of answers to questions by policy and size, and differences between policies, with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msrnn.evaluation import statistics
from msrnn.evaluation.cells import FULL, TRUNCATED, Cell, Grid
from msrnn.evaluation.report import INLINE, MISSING, Formatted, Table, document, plot_estimates, save_figure
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.tasks.answer_scores import Scores
from msrnn.evaluation.tasks.answers import Answers, StoredQuestion
from msrnn.evaluation.tasks.question_tasks import QuestionTask


@dataclass(frozen=True)
class Report:
    """Scores, and differences between policies, on questions that every cell of the grid has answered."""

    task: QuestionTask
    grid: Grid
    answers: Answers
    keys: list[str]  # of the questions
    against: str  # the policy that others are compared with, at the same size
    scores: Scores

    @cached_property
    def questions(self) -> list[StoredQuestion]:
        return [self.answers.questions[key] for key in self.keys]

    def _columns(self, cell: Cell) -> list[list[float]]:
        """For each document, the sums of each part over its questions; and last, the number of questions."""
        documents: dict[str, list[list[float]]] = {}
        for question, score in zip(self.questions, self.scores[cell], strict=True):
            documents.setdefault(question.document, []).append([*score.values, 1.0])
        sums = [[sum(part) for part in zip(*scores, strict=True)] for scores in documents.values()]
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

        def points(sums: Sequence[Any]) -> Any:
            return self._overall(sums[:width]) - self._overall(sums[width:])

        return {
            (cell, other): statistics.bootstrap([*self._columns(cell), *self._columns(other)], points)
            for cell, other in self.grid.pairs_with(self.against)
        }

    def kinds(self, name: str, size: int) -> dict[str, list[float]]:
        """The first part of each score, by the kind of the best reference."""
        by_kind: dict[str, list[float]] = {}
        for score in self.scores[self.grid.at(name, size)]:
            if score.kind:
                by_kind.setdefault(score.kind, []).append(score.values[0])
        return by_kind

    def summary(self) -> str:
        """The number of questions, and how much of their documents was read."""
        entries = [question.prompts[self.answers.settings.length] for question in self.questions]
        tokens, cut = sum(entry[1] for entry in entries), sum(entry[2] for entry in entries)
        shorter = sum(entry[2] > 0 for entry in entries)
        return (
            f"{len(self.questions):,} on {len({question.document for question in self.questions}):,} documents; "
            f"prompts of {tokens / len(entries):,.0f} tokens on average; "
            f"{cut / len(entries):,.0f} tokens of the document cut on average, in {shorter:,} of them"
        )

    def tables(self, title: str) -> list[Table]:
        """The scores; and the difference of each policy to the one compared with."""
        grid = self.grid
        rows = grid.rows(grid.policies, lambda name, size: format_score(self.score(name, size)))
        tables = [Table(self.task.name, f"{self.task.metric.name}: {title}", "", grid.header, rows, self._lines())]
        if compared := grid.find_comparable(self.against):
            against = f"points against {self.against} at the same size, on the same questions"
            note = f"{against[0].upper()}{against[1:]}."
            tables.append(Table("", against, note, grid.header, grid.rows(compared, self._points)))
        return tables

    def _points(self, name: str, size: int) -> Formatted | None:
        difference = self.difference(name, size)
        return format_score(difference, "+") if difference else None

    def _lines(self) -> list[Sequence[Any]]:
        names = "policy", "size", "score", "low", "high", *self.task.metric.parts, "questions"
        lines: list[Sequence[Any]] = [[*names, "against", "difference", "difference_low", "difference_high"]]
        for name, size in self.grid.places:
            difference = self.difference(name, size)
            compared = [self.against, *difference] if difference else [""] * 4
            scores = [*self.score(name, size), *self.parts(name, size)]
            lines.append([name, size, *scores, len(self.questions), *compared])
        return lines

    def _kind_table(self) -> list[Table]:
        """Scores by kind, if references have kinds."""
        kinds = sorted({kind for place in self.grid.places for kind in self.kinds(*place)})
        rows = {}
        for name, size in self.grid.places:
            scores = self.kinds(name, size)
            values = [
                f"{sum(x) / len(x):.2f}{INLINE}{len(x)}" if (x := scores.get(kind)) else MISSING for kind in kinds
            ]
            rows[self.grid.at(name, size).label] = values
        note = "By the kind of the best reference, and how many answers these are."
        table = Table("", "", note, ["", *kinds], [[label, *values] for label, values in rows.items()])
        return [table] if kinds else []

    def markdown(self, title: str, facts: dict[str, Any]) -> str:
        name = self.task.metric.name
        about = f"{title}. {name}; each value with its 95 % interval, by bootstrap over the documents."
        tables = [*self.tables(title), *self._kind_table()]
        return document(self.task.title, about, tables, {"questions": self.summary(), **facts})


def format_score(estimate: Estimate, sign: str = "") -> Formatted:
    return Formatted(estimate, lambda x: f"{x:{sign}.2f}")


def figure(report: Report, folder: Path, title: str) -> None:
    """TASK.png and .svg: score over size, a line for each policy; the full model is dashed."""
    with save_figure(folder, report.task.name, 1, 7.5) as (_, (axes,)):
        for name in report.grid.policies:
            sizes = report.grid.sizes_of(name)
            points = [report.score(name, size) for size in sizes]
            if name == FULL:
                axes.axhline(points[0].value, color="black", linestyle="--", linewidth=1, label=FULL)
                continue
            style = {"color": "gray", "linestyle": ":"} if name == TRUNCATED else {}
            plot_estimates(axes, sizes, points, marker="o", markersize=3, label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(report.grid.sizes, [f"{size:,}" for size in report.grid.sizes])
        axes.set_xlabel("size: KV rows per layer")
        axes.set_ylabel(report.task.metric.name)
        axes.legend(frameon=False, fontsize=8)
        axes.set_title(title, fontsize=10)
