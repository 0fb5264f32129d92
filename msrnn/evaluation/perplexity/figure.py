"""Perplexity over size, a line for each policy; and how far each is from the unbounded model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from msrnn.evaluation.cells import BASELINE, Cell
from msrnn.evaluation.figures import curve, drawn
from msrnn.evaluation.perplexity.report import Report
from msrnn.policy import FULL


def figure(report: Report, folder: Path, title: str) -> None:
    """As perplexity.png and perplexity.svg; the unbounded model is the dashed line."""
    away = _distances(report)
    with drawn(folder, "perplexity", 2 if away else 1, 11 if away else 7.5) as (whole, panels):
        for name in report.grid.policies:
            if name != FULL:
                sizes = report.grid.sizes_of(name)
                curve(panels[0], sizes, [report.perplexity(name, n) for n in sizes], label=name, **_style(name))
        if FULL in report.grid.policies:
            value = report.perplexity(FULL, report.grid.sizes[0]).value
            panels[0].axhline(value, color="black", linestyle="--", linewidth=1, label=FULL)
        panels[0].set_ylabel("perplexity")
        panels[0].legend(frameon=False, fontsize=8)
        for name, percents in away.items():
            panels[1].plot(report.grid.sizes_of(name), percents, **_style(name))
            panels[1].set_ylabel("perplexity above the full model's, %")
        for axes in panels:
            _scales(axes, report)
        whole.suptitle(title, fontsize=10)


def _style(name: str) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3, **({"color": "gray", "linestyle": ":"} if name == BASELINE else {})}


def _distances(report: Report) -> dict[str, list[float]]:
    """Percents above the unbounded model, for each policy; empty where that was not read, or nobody is above it.

    A logarithm knows no distance of nothing, nor one below it: such points are left out.
    """
    if (full := Cell(FULL, None)) not in report.results:
        return {}
    least, names = report.nll_of(full).value, [name for name in report.grid.policies if name != FULL]
    grid = report.grid
    away = {name: [100 * math.expm1(report.nll(name, n).value - least) for n in grid.sizes_of(name)] for name in names}
    shown = {name: [x if x > 0 else math.nan for x in percents] for name, percents in away.items()}
    return shown if any(x > 0 for percents in away.values() for x in percents) else {}


def _scales(axes: Any, report: Report) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(report.grid.sizes, [f"{size:,}" for size in report.grid.sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("size: states in each layer")
