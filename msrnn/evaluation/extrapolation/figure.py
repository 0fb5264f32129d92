"""Perplexity over the tokens read, a line for each case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msrnn.evaluation.extrapolation.cases import Case
from msrnn.evaluation.extrapolation.report import Report
from msrnn.evaluation.figures import curve, drawn
from msrnn.evaluation.statistics import Estimate


def figure(report: Report, folder: Path, title: str, trained: int | None) -> None:
    """As extrapolation.png and extrapolation.svg; the dashed line is where the model's training length ends."""
    with drawn(folder, "extrapolation", 2, 13) as (whole, (left, right)):
        _lines(left, report, report.so_far)
        _lines(right, report, report.windows)
        left.set_ylabel("perplexity of all tokens so far")
        right.set_ylabel(f"perplexity of each {report.course.window:,} tokens")
        for axes in (left, right):
            if trained and trained < report.course.tokens:
                axes.axvline(trained, color="black", linestyle="--", linewidth=1)
            _scales(axes)
        left.legend(frameon=False)
        whole.suptitle(title, fontsize=10)


def _lines(axes: Any, report: Report, perplexities: dict[Case, list[Estimate]]) -> None:
    for case, points in perplexities.items():
        curve(axes, report.ends, points, linewidth=1.2, label=report.label(case))


def _scales(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, ScalarFormatter

    axes.set_yscale("log")  # what breaks down does so by orders of magnitude
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(ScalarFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.set_xlabel("tokens read")
