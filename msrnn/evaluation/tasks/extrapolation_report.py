"""Tables and a figure of an extrapolation: perplexity of all tokens so far, and of each window of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from msrnn.evaluation import statistics
from msrnn.evaluation.report import Table, document, plot_estimates, save_figure
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.tasks.extrapolation_cases import Case
from msrnn.evaluation.tasks.extrapolation_legs import Course
from msrnn.evaluation.tasks.perplexity import format_perplexity

NAME = "extrapolation"
COLUMNS = (
    *("policy", "positions", "size", "tokens", "so_far", "so_far_low", "so_far_high"),
    *("window", "window_low", "window_high", "texts"),
)

Results = dict[Case, list[list[float]]]  # by text: the summed negative log-likelihood of each window


@dataclass(frozen=True)
class Report:
    results: Results
    course: Course

    @property
    def cases(self) -> list[Case]:
        return list(self.results)

    def label(self, case: Case) -> str:
        """With the size, where cases have different ones."""
        several = len({one.size for one in self.cases if one.size is not None}) > 1
        return f"{case.label} {case.size:,}" if several and case.size is not None else case.label

    @property
    def texts(self) -> int:
        return len(next(iter(self.results.values())))

    @property
    def ends(self) -> list[int]:
        """Tokens up to the end of each window."""
        count = len(self.course.counts)
        return [min((i + 1) * self.course.window, self.course.tokens) for i in range(count)]

    @property
    def columns(self) -> list[int]:
        """The windows that the tables show: the first, each that ends at twice as many tokens, the last."""
        count = len(self.course.counts)
        return [*(2**i - 1 for i in range(count.bit_length()) if 2**i < count), count - 1]

    @cached_property
    def so_far(self) -> dict[Case, list[Estimate]]:
        """Perplexity of all tokens up to the end of each window."""
        counts = list(accumulate(self.course.counts))
        sums = {case: [list(accumulate(nll)) for nll in texts] for case, texts in self.results.items()}
        return {case: self._perplexities(texts, counts) for case, texts in sums.items()}

    @cached_property
    def windows(self) -> dict[Case, list[Estimate]]:
        """Perplexity of each window alone."""
        return {case: self._perplexities(texts, self.course.counts) for case, texts in self.results.items()}

    def _perplexities(self, sums: list[list[float]], counts: list[int]) -> list[Estimate]:
        by_window = zip(*sums, strict=True)
        return [statistics.perplexity(nll, [count] * len(nll)) for nll, count in zip(by_window, counts, strict=True)]

    def tables(self, title: str) -> list[Table]:
        header = ["policy@positions", *(f"{self.ends[i]:,}" for i in self.columns)]
        last = f"perplexity of the last {self.course.window:,} tokens alone"
        note = f"The same of the last {self.course.window:,} tokens alone."
        return [
            Table(
                NAME, f"perplexity of all tokens so far: {title}", "", header, self._rows(self.so_far), self._lines()
            ),
            Table("", last, note, header, self._rows(self.windows)),
        ]

    def _rows(self, estimates: dict[Case, list[Estimate]]) -> list[list[Any]]:
        return [
            [self.label(case), *(format_perplexity(estimates[case][i]) for i in self.columns)] for case in self.cases
        ]

    def _lines(self) -> list[Sequence[Any]]:
        """A line for each window of each case."""
        lines: list[Sequence[Any]] = [COLUMNS]
        for case in self.cases:
            for end, so_far, window in zip(self.ends, self.so_far[case], self.windows[case], strict=True):
                lines.append([case.policy, case.positions, case.size, end, *so_far, *window, self.texts])
        return lines

    def markdown(self, title: str, facts: dict[str, Any]) -> str:
        about = f"{title}. Perplexity of all tokens so far, and its 95 % interval over texts."
        return document("Extrapolation", about, self.tables(title), facts)


def figure(report: Report, folder: Path, title: str, trained: int | None) -> None:
    """extrapolation.png and .svg: perplexity over tokens read; the dashed line is the training length."""
    with save_figure(folder, NAME, 2, 13) as (whole, (left, right)):
        for axes, estimates in ((left, report.so_far), (right, report.windows)):
            for case, points in estimates.items():
                plot_estimates(axes, report.ends, points, linewidth=1.2, label=report.label(case))
            if trained and trained < report.course.tokens:
                axes.axvline(trained, color="black", linestyle="--", linewidth=1)
            _scales(axes)
        left.set_ylabel("perplexity of all tokens so far")
        right.set_ylabel(f"perplexity of each {report.course.window:,} tokens")
        left.legend(frameon=False)
        whole.suptitle(title, fontsize=10)


def _scales(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, ScalarFormatter

    axes.set_yscale("log")  # perplexities differ by orders of magnitude where a method fails
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(ScalarFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.set_xlabel("tokens read")
