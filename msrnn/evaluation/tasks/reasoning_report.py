"""Tables of `Reasoning`: the share of problems that are solved, and paired differences between versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msrnn.evaluation import statistics
from msrnn.evaluation.data.reasoning_prompts import AskedProblems
from msrnn.evaluation.report import Formatted, Table, document
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.tasks.reasoning import FULL_CASE, NAME, PROMPT, Case, Reply, Results

Replies = Sequence[Reply]  # to one prompt


@dataclass(frozen=True)
class Report:
    """Shares of problems that are solved, with their 95 % confidence intervals by bootstrap over the prompts."""

    results: Results
    asked: Sequence[AskedProblems]
    samples: int

    @cached_property
    def datasets(self) -> dict[str, int]:
        """The number of problems of each."""
        names = dict.fromkeys(one.dataset for one in self.asked)
        return {name: sum(len(one.problems) for one in self.asked if one.dataset == name) for name in names}

    def right(self, case: Case, dataset: str) -> Estimate:
        """The share of right answers, over all samples."""
        return self._mean(dataset, lambda i: count_right(self._replies(case, i)))

    def pass_share(self, case: Case, dataset: str) -> Estimate:
        """pass@N: the share of problems that at least one sample solves."""
        return self._mean(dataset, lambda i: count_solved(self._replies(case, i)))

    def difference(self, case: Case, other: Case, dataset: str, count: Callable[[Replies], float]) -> Estimate:
        """The paired difference of two shares on the same prompts; `count` is `count_right` or `count_solved`."""
        return self._mean(dataset, lambda i: count(self._replies(case, i)) - count(self._replies(other, i)))

    def tokens(self, case: Case, dataset: str) -> Estimate:
        """Of an answer; all problems of a prompt have one."""
        return self._mean(dataset, lambda i: _average(self._replies(case, i), lambda one: one.tokens), prompts=True)

    def cut(self, case: Case, dataset: str) -> Estimate:
        """The share of answers that end at the limit."""
        return self._mean(dataset, lambda i: _average(self._replies(case, i), lambda one: not one.ended), prompts=True)

    def share_protected(self, case: Case, dataset: str) -> Estimate:
        """The share of a prompt that is protected: where it does not fit, only its first tokens are."""
        return self._mean(dataset, lambda i: _average(self._replies(case, i), lambda one: one.protected), prompts=True)

    def _replies(self, case: Case, prompt: int) -> Replies:
        return self.results[case][prompt * self.samples : (prompt + 1) * self.samples]

    def _mean(self, dataset: str, value: Callable[[int], float], prompts: bool = False) -> Estimate:
        """Over problems or prompts. Problems of one prompt are not independent, so prompts are resampled."""
        own = [i for i, one in enumerate(self.asked) if one.dataset == dataset]
        return statistics.mean([value(i) for i in own], [1 if prompts else len(self.asked[i].problems) for i in own])

    @cached_property
    def pairs(self) -> list[tuple[Case, Case]]:
        """Each version and the full model, the same without protection, and the same without recall."""
        bounded = [(case, FULL_CASE) for case in self.results if case != FULL_CASE]
        protected = [(case, case.without_protection) for case in self.results if case.protect == PROMPT]
        recalling = [(case, case.without_recall) for case in self.results if case.cell.recalled]
        return [(case, other) for case, other in protected + recalling + bounded if other in self.results]

    def tables(self, title: str) -> list[Table]:
        tables = [self._table(dataset, title, number == 0) for number, dataset in enumerate(self.datasets)]
        return tables + ([self._differences(dataset) for dataset in self.datasets] if self.pairs else [])

    def _table(self, dataset: str, title: str, first: bool) -> Table:
        header = ["version", "right", *self._pass, "tokens", "cut", "protected"]
        rows: list[list[Any]] = [
            [
                case.label,
                Formatted(self.right(case, dataset), "{:.1%}".format),
                *([Formatted(self.pass_share(case, dataset), "{:.1%}".format)] if self._pass else []),
                Formatted(self.tokens(case, dataset), "{:,.0f}".format),
                f"{self.cut(case, dataset).value:.1%}",
                f"{self.share_protected(case, dataset).value:.0%}" if case.protect == PROMPT else None,
            ]
            for case in self.results
        ]
        about = f"{dataset}, {self.datasets[dataset]:,} problems" + (f": {title}" if first else "")
        return Table(NAME if first else "", about, f"{about}.", header, rows, self._lines() if first else None)

    def _differences(self, dataset: str) -> Table:
        counts = {"right": count_right, **dict.fromkeys(self._pass, count_solved)}
        rows: list[list[Any]] = [
            [
                f"{case.label} against {other.label}",
                *(
                    Formatted(self.difference(case, other, dataset, count), "{:+.1%}".format)
                    for count in counts.values()
                ),
            ]
            for case, other in self.pairs
        ]
        about = f"{dataset}, paired differences on the same problems"
        return Table("", about, f"{about}.", ["version", *counts], rows)

    @cached_property
    def _pass(self) -> list[str]:
        return [f"pass@{self.samples}"] if self.samples > 1 else []

    def _lines(self) -> list[Sequence[Any]]:
        means = [f"{name}{end}" for name in ("right", "pass", "tokens") for end in ("", "_low", "_high")]
        lines: list[Sequence[Any]] = [
            ["policy", "size", "protect", "dataset", "problems", "samples", *means, "cut", "protected"]
        ]
        for case in self.results:
            for name, problems in self.datasets.items():
                estimates = [*self.right(case, name), *self.pass_share(case, name), *self.tokens(case, name)]
                shares = [self.cut(case, name).value, self.share_protected(case, name).value]
                lines.append([*case, name, problems, self.samples, *estimates, *shares])
        return lines

    def markdown(self, title: str, facts: dict[str, Any]) -> str:
        about = (
            f"{title}. Right: the share of right final answers{', over all samples' if self._pass else ''}. "
            "Tokens: of an answer; cut: answers that end at the limit. Protected: the share of a prompt that is not "
            "evicted while its answer is generated; where it does not fit, only its first tokens are. Intervals are "
            "95 %, by bootstrap over the prompts."
        )
        return document("Reasoning", about, self.tables(title), facts)


def count_right(replies: Replies) -> float:
    """Right answers to the problems of a prompt, the mean over samples."""
    return _average(replies, lambda one: sum(one.right))


def count_solved(replies: Replies) -> float:
    """Problems of a prompt that at least one sample solves."""
    return sum(map(any, zip(*(one.right for one in replies), strict=True)))


def _average(replies: Replies, value: Callable[[Reply], float]) -> float:
    return sum(map(value, replies)) / len(replies)
