"""Score over size, a line for each policy."""

from __future__ import annotations

from pathlib import Path

from msrnn.evaluation.cells import TRUNCATED
from msrnn.evaluation.figures import curve, drawn
from msrnn.evaluation.understanding.report import Report
from msrnn.policy import FULL


def figure(report: Report, folder: Path, title: str) -> None:
    """As TASK.png and TASK.svg; the unbounded model is the dashed line."""
    with drawn(folder, report.task.name, 1, 7.5) as (_, (axes,)):
        for name in report.grid.policies:
            sizes = report.grid.sizes_of(name)
            points = [report.score(name, size) for size in sizes]
            if name == FULL:
                axes.axhline(points[0].value, color="black", linestyle="--", linewidth=1, label=FULL)
                continue
            style = {"color": "gray", "linestyle": ":"} if name == TRUNCATED else {}
            curve(axes, sizes, points, marker="o", markersize=3, label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(report.grid.sizes, [f"{size:,}" for size in report.grid.sizes])
        axes.set_xlabel("size: states in each layer")
        axes.set_ylabel(report.task.metric.name)
        axes.legend(frameon=False, fontsize=8)
        axes.set_title(title, fontsize=10)
