"""Tables as text, Markdown and CSV; figures as files. Every evaluation and analysis reports through here."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msrnn.evaluation.statistics import Estimate

MISSING = "—"
INLINE = " · "  # between a value and its interval in one line


class Share(float):
    """A number that is written in percent."""


class Formatted(NamedTuple):
    """An estimate, and how its value and the ends of its interval are written."""

    estimate: Estimate
    number: Callable[[float], str]
    to: str = " to "

    def text(self, between: str) -> str:
        value, low, high = (None if x is None else self.number(x) for x in self.estimate)
        return f"{value}" + ("" if low is None else f"{between}{low}{self.to}{high}")


Value = str | int | float | Formatted | None


class Table(NamedTuple):
    """Rows of values under a header. Missing values are None or NaN."""

    name: str  # of its files
    title: str
    note: str  # what its numbers mean
    header: Sequence[str]
    rows: Sequence[Sequence[Value]]
    lines: Sequence[Sequence[Any]] | None = (
        None  # of the CSV, its header first; None: the CSV has the header and the rows
    )

    def strings(self, between: str = "\n") -> list[list[str]]:
        """The rows as text; `between` separates a value from its interval."""
        return [[_text(value, between) for value in row] for row in self.rows]

    def markdown(self) -> str:
        """The table alone. The first column has names, the others numbers."""
        rows = [[text.replace("|", "\\|") for text in row] for row in self.strings(INLINE)]
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)], *rows]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def csv(self) -> str:
        """In full precision; missing values are empty."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        for line in self.lines or [self.header, *self.rows]:
            writer.writerow("" if value is None or value != value else _plain(value) for value in line)
        return file.getvalue()


def _text(value: Value, between: str) -> str:
    if isinstance(value, Formatted):
        return value.text(between)
    if value is None or value != value:
        return MISSING
    if isinstance(value, Share):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Share) else value


def document(heading: str, about: str, tables: Sequence[Table], facts: Mapping[str, Any], titles: bool = False) -> str:
    """A Markdown page: a heading, each table below its note, and a list of what they were computed with.

    With `titles`, each table has its title as a heading.
    """
    parts = [f"# {heading}\n\n{about}\n"]
    for table in tables:
        if titles:
            parts.append(f"## {table.title}\n")
        if table.note:
            parts.append(f"{table.note}\n")
        parts.append(table.markdown())
    return "\n".join([*parts, markdown_list(facts)])


def markdown_list(facts: Mapping[str, Any]) -> str:
    """One line for each fact that is not empty."""
    return "".join(f"- {name}: {value}\n" for name, value in facts.items() if value != "")


def code(text: str) -> str:
    """Text as inline code in Markdown; more backticks around text that has some."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if text[:1] == "`" or text[-1:] == "`" else f"{fence}{text}{fence}"


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot_estimates(axes: Any, x: Sequence[float], points: Sequence[Estimate], **style: Any) -> None:
    """A line of estimates over x, and their intervals as a band."""
    (line,) = axes.plot(x, [point.value for point in points], **style)
    if all(point.low is not None for point in points):
        ends = [point.low for point in points], [point.high for point in points]
        axes.fill_between(x, *ends, color=line.get_color(), alpha=0.15, linewidth=0)


@contextmanager
def save_figure(
    folder: Path, name: str, columns: int, width: float, rows: int = 1, height: float = 4.2
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its axes, row by row, saved as NAME.png and NAME.svg; the same data gives the same bytes."""
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
