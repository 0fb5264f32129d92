"""Figures as files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msrnn.evaluation.statistics import Estimate


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def curve(axes: Any, x: Sequence[float], points: Sequence[Estimate], **style: Any) -> None:
    """Estimates over x, and their intervals as a band."""
    (line,) = axes.plot(x, [point.value for point in points], **style)
    if all(point.low is not None for point in points):
        ends = [point.low for point in points], [point.high for point in points]
        axes.fill_between(x, *ends, color=line.get_color(), alpha=0.15, linewidth=0)


@contextmanager
def drawn(
    folder: Path, name: str, columns: int, width: float, rows: int = 1, height: float = 4.2
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its axes, row by row, written as NAME.png and NAME.svg: the same bytes for the same figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "msrnn", "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
        try:
            yield figure, list(axes.flat)
            figure.savefig(folder / f"{name}.png", dpi=150)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        finally:
            pyplot.close(figure)
