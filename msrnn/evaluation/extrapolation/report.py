"""The results as figures: the perplexity of all tokens so far, and of each window of tokens."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from msrnn.evaluation import statistics
from msrnn.evaluation.extrapolation.cases import Case
from msrnn.evaluation.extrapolation.legs import Course
from msrnn.evaluation.extrapolation.run import Results
from msrnn.evaluation.perplexity.report import shown
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.tables import markdown_list, markdown_table

COLUMNS = (
    *("policy", "positions", "size", "tokens", "so_far", "so_far_low", "so_far_high"),
    *("window", "window_low", "window_high", "texts"),
)


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
    def shown_ends(self) -> list[int]:
        """Windows that a table has room for: the first, each that ends at twice as many tokens, the last."""
        count = len(self.course.counts)
        return [*(2**i - 1 for i in range(count.bit_length()) if 2**i < count), count - 1]

    @cached_property
    def so_far(self) -> dict[Case, list[Estimate]]:
        """Perplexity of all tokens up to the end of each window."""
        return {
            case: self._perplexities([list(accumulate(nll)) for nll in texts], list(accumulate(self.course.counts)))
            for case, texts in self.results.items()
        }

    @cached_property
    def windows(self) -> dict[Case, list[Estimate]]:
        """Perplexity of each window alone."""
        return {case: self._perplexities(texts, self.course.counts) for case, texts in self.results.items()}

    def _perplexities(self, sums: list[list[float]], counts: list[int]) -> list[Estimate]:
        by_window = zip(*sums, strict=True)
        return [statistics.perplexity(nll, [count] * len(nll)) for nll, count in zip(by_window, counts, strict=True)]

    def table(self, perplexities: dict[Case, list[Estimate]], between: str = "\n") -> list[list[str]]:
        """A row for each case: its name, and the perplexity at each end that is shown."""
        ends = self.shown_ends
        return [[self.label(case), *(shown(perplexities[case][i], between) for i in ends)] for case in self.cases]


def headers(report: Report) -> list[str]:
    return ["policy@positions", *(f"{report.ends[i]:,}" for i in report.shown_ends)]


def markdown(report: Report, title: str, told: dict[str, str]) -> str:
    """Both tables, and below them what they were computed with."""
    parts = [f"# Extrapolation\n\n{title}. Perplexity of all tokens so far, and its 95 % interval over texts.\n"]
    parts.append(markdown_table(headers(report), report.table(report.so_far, " · ")))
    parts.append(f"The same of the last {report.course.window:,} tokens alone.\n")
    parts.append(markdown_table(headers(report), report.table(report.windows, " · ")))
    return "\n".join([*parts, markdown_list(told)])


def as_csv(report: Report) -> str:
    """A line for each window of each case, in full precision."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for case in report.cases:
        for end, so_far, window in zip(report.ends, report.so_far[case], report.windows[case], strict=True):
            writer.writerow([case.policy, case.positions, case.size, end, *so_far, *window, report.texts])
    return file.getvalue()
