"""Figures as files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the figure needs matplotlib, which is not installed: pip install 'msrnn[plots]'")


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
