"""The efficiency table as a figure, beside what the paper reports."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msrnn.evaluate.efficiency import Row

# Relative throughput of LLaMA-2-7B at each size (Oren et al. 2024); None: the full model.
PAPER: dict[int | None, float] = {256: 8.5, 512: 4.8, 1024: 3.1, 2048: 1.7, None: 1.0}
COLORS = {"step": "#2a6f97", "whole": "#61a5c2", "paper": "#c9a227", "rest": "#c8553d"}


def check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the figure needs matplotlib, which is not installed: pip install 'msrnn[plots]'")


def efficiency(rows: Sequence[Row], folder: Path, title: str) -> list[Path]:
    """Relative throughput, and the time of a step over its floor, as efficiency.png and efficiency.svg."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "msrnn", "axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(max(9, 1.6 * len(rows) + 4), 4.2), layout="constrained")
        _throughput(left, rows)
        _over_floor(right, rows)
        figure.suptitle(title)
        paths = [folder / "efficiency.png", folder / "efficiency.svg"]
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
        pyplot.close(figure)
    return paths


def _throughput(axes: Any, rows: Sequence[Row]) -> None:
    full = rows[0]
    series = {
        "a step, full states": [_ratio(row.throughput, full.throughput) for row in rows],
        "whole sequences": [_ratio(row.whole, full.whole) for row in rows],
        "the paper, LLaMA-2-7B": _paper(rows),
    }
    for i, ((name, values), color) in enumerate(zip(series.items(), ("step", "whole", "paper"), strict=True)):
        places = [n + 0.27 * (i - 1) for n, value in enumerate(values) if value]
        bars = axes.bar(places, [value for value in values if value], 0.25, label=name, color=COLORS[color])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_title("throughput at the largest batch, relative to full")
    axes.legend(frameon=False)
    _names(axes, rows)


def _paper(rows: Sequence[Row]) -> list[float | None]:
    """At the first row of each size."""
    sizes = [row.size for row in rows]
    return [PAPER.get(size) if size not in sizes[:i] else None for i, size in enumerate(sizes)]


def _over_floor(axes: Any, rows: Sequence[Row]) -> None:
    measured = [(n, row.floor, row.ms) for n, row in enumerate(rows) if row.floor and row.ms]
    places = [n for n, _, _ in measured]
    floors = [floor for _, floor, _ in measured]
    axes.bar(places, floors, 0.5, label="floor", color=COLORS["step"])
    rest = [max(0.0, ms - floor) for _, floor, ms in measured]
    bars = axes.bar(places, rest, 0.5, bottom=floors, label="over the floor, and the ratio", color=COLORS["rest"])
    axes.bar_label(bars, labels=[f"{ms / floor:.2f}" for _, floor, ms in measured], fontsize=8)
    axes.set_title("milliseconds of a step at the largest batch")
    axes.legend(frameon=False)
    _names(axes, rows)


def _names(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_xticks(range(len(rows)), [row.label.replace(", ", ",\n") for row in rows], rotation=30, ha="right")


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None
