"""Perplexity over size, a line for each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msrnn.evaluate.figures import drawn
from msrnn.evaluate.perplexity.cells import BASELINE
from msrnn.evaluate.perplexity.report import Report
from msrnn.policy import FULL


def figure(report: Report, folder: Path, title: str) -> None:
    """As perplexity.png and perplexity.svg; the unbounded model is the dashed line."""
    with drawn(folder, "perplexity", 1, 7.5) as (whole, (axes,)):
        for name in report.grid.policies:
            if name == FULL:
                value = report.perplexity(FULL, report.grid.sizes[0]).value
                axes.axhline(value, color="black", linestyle="--", linewidth=1, label=FULL)
            else:
                _line(axes, report, name)
        _scales(axes, report)
        whole.suptitle(title, fontsize=10)


def _line(axes: Any, report: Report, name: str) -> None:
    sizes = report.grid.sizes
    points = [report.perplexity(name, size) for size in sizes]
    style = {"color": "gray", "linestyle": ":"} if name == BASELINE else {}
    (line,) = axes.plot(sizes, [point.value for point in points], marker="o", markersize=3, label=name, **style)
    if all(point.low is not None for point in points):
        ends = [point.low for point in points], [point.high for point in points]
        axes.fill_between(sizes, *ends, color=line.get_color(), alpha=0.15, linewidth=0)


def _scales(axes: Any, report: Report) -> None:
    from matplotlib.ticker import NullLocator, ScalarFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(report.grid.sizes, [f"{size:,}" for size in report.grid.sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(ScalarFormatter())
    axes.set_xlabel("size: states in each layer")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False)
