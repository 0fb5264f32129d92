"""Tables as Markdown, and what stands in their cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msrnn.evaluation.statistics import Estimate

MISSING = "—"


def estimated(estimate: Estimate, show: Callable[[float], str], between: str) -> str:
    """A value and its interval, if it has one."""
    value, low, high = (None if x is None else show(x) for x in estimate)
    return f"{value}" + ("" if low is None else f"{between}{low} to {high}")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is of names, the others are of numbers."""
    shown = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in shown)


def markdown_list(setting: dict[str, str]) -> str:
    """What is empty is not there."""
    return "".join(f"- {name}: {value}\n" for name, value in setting.items() if value != "")
