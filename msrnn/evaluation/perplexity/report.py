"""The results as figures: perplexities, and differences between policies on the same chunks."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from msrnn.evaluation import statistics
from msrnn.evaluation.cells import Cell, Grid
from msrnn.evaluation.perplexity.run import Results
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.tables import MISSING, estimated, markdown_list, markdown_table

COLUMNS = (
    *("policy", "size", "perplexity", "low", "high", "nll", "nll_low", "nll_high", "chunks", "tokens"),
    *("against", "difference", "difference_low", "difference_high", "ratio", "ratio_low", "ratio_high"),
)
Show = Callable[[Estimate], str]


@dataclass(frozen=True)
class Report:
    grid: Grid
    results: Results
    predicted: int  # tokens of each chunk
    against: str  # the policy that others are compared with, at the same size

    def nll(self, name: str, size: int) -> Estimate:
        """Per token."""
        return self.nll_of(self.grid.at(name, size))

    def nll_of(self, cell: Cell) -> Estimate:
        return self._nll[cell]

    def perplexity(self, name: str, size: int) -> Estimate:
        return self.nll(name, size).exp()

    def difference(self, name: str, size: int) -> Estimate | None:
        """Nats per token more than the policy compared with; None: it is the same cell."""
        return self._differences.get((self.grid.at(name, size), self.grid.at(self.against, size)))

    @cached_property
    def _nll(self) -> dict[Cell, Estimate]:
        return {cell: statistics.mean(sums, self._counts) for cell, sums in self.results.items()}

    @cached_property
    def _differences(self) -> dict[tuple[Cell, Cell], Estimate]:
        grid, against = self.grid, self.grid.sizes_of(self.against)
        places = [(name, size) for name, size in grid.places if name != self.against and size in against]
        pairs = dict.fromkeys((grid.at(name, size), grid.at(self.against, size)) for name, size in places)
        return {
            (cell, other): statistics.difference(self.results[cell], self.results[other], self._counts)
            for cell, other in pairs
            if cell != other
        }

    @property
    def _counts(self) -> list[int]:
        return [self.predicted] * len(next(iter(self.results.values())))

    @property
    def compared(self) -> list[str]:
        """The other policies that were computed at a size of the one compared with."""
        sizes = set(self.grid.sizes_of(self.against))
        return [name for name in self.grid.policies if name != self.against and sizes & set(self.grid.sizes_of(name))]

    def perplexities(self, show: Show) -> list[list[str]]:
        """A row for each policy: its name, and each size's perplexity."""
        return self.grid.rows(self.grid.policies, lambda name, size: show(self.perplexity(name, size)))

    def differences(self, show: Show) -> list[list[str]]:
        """A row for each other policy: its name, and each size's difference in nats per token."""
        return self.grid.rows(
            self.compared, lambda name, size: show(one) if (one := self.difference(name, size)) else MISSING
        )


def shown(estimate: Estimate, between: str = "\n") -> str:
    """A perplexity and its interval."""
    low, high = estimate.low, estimate.high
    return _number(estimate.value) + (
        "" if low is None or high is None else f"{between}{_number(low)}–{_number(high)}"  # noqa: RUF001
    )


def _number(value: float) -> str:
    """Four digits or more."""
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def shown_ratio(difference: Estimate, between: str = "\n") -> str:
    """How the perplexity changes, in percent."""
    return estimated(difference.exp(), lambda x: f"{x - 1:+.1%}", between)


def markdown(report: Report, title: str, told: dict[str, str]) -> str:
    """Both tables, and below them what they were computed with."""
    parts = [f"# Perplexity\n\n{title}. Beside each value its 95 % interval, by bootstrap over the chunks.\n"]
    parts.append(markdown_table(report.grid.headers, report.perplexities(lambda x: shown(x, " · "))))
    if report.compared:
        parts.append(
            f"Against {report.against} at the same size, on the same chunks: nats per token, and perplexity.\n"
        )
        parts.append(markdown_table(report.grid.headers, report.differences(_both)))
    return "\n".join([*parts, markdown_list(told)])


def _both(difference: Estimate) -> str:
    return f"{difference.value:+.4f}, {shown_ratio(difference, ' · ')}"


def as_csv(report: Report) -> str:
    """A line for each place of the tables, in full precision."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, size in report.grid.places:
        writer.writerow(_line(report, name, size))
    return file.getvalue()


def _line(report: Report, name: str, size: int) -> list[object]:
    nll, difference = report.nll(name, size), report.difference(name, size)
    compared = [report.against, *difference, *difference.exp()] if difference else [""] * 7
    chunks = len(report.results[report.grid.at(name, size)])
    return [name, size, *nll.exp(), *nll, chunks, chunks * report.predicted, *compared]
