"""The efficiency table as a figure, beside what the paper reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msrnn.evaluation.efficiency.bench import Row
from msrnn.evaluation.figures import drawn

# Relative throughput of LLaMA-2-7B at each size (Oren et al. 2024); None: the full model.
PAPER: dict[int | None, float] = {256: 8.5, 512: 4.8, 1024: 3.1, 2048: 1.7, None: 1.0}
COLORS = {"step": "#2a6f97", "whole": "#61a5c2", "paper": "#c9a227", "rest": "#c8553d"}


def figure(rows: Sequence[Row], folder: Path, title: str) -> None:
    """Relative throughput, and the time of a step over its floor, as efficiency.png and efficiency.svg."""
    with drawn(folder, "efficiency", 2, max(9, 1.6 * len(rows) + 4)) as (whole, (left, right)):
        _throughput(left, rows)
        _over_floor(right, rows)
        whole.suptitle(title)


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
    measured = [(n, row.floor, row.ms.median) for n, row in enumerate(rows) if row.floor and row.ms]
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
