"""A study as tables: each with its definition, as Markdown, as CSV and as rows of strings."""

from __future__ import annotations

import csv
import io
import re
from typing import NamedTuple

from msrnn.evaluation.tables import MISSING, markdown_table

Value = str | int | float | None


class Share(float):
    """A number that is shown in percent."""


class Table(NamedTuple):
    name: str  # of its files
    title: str
    note: str  # what its numbers mean
    header: list[str]
    rows: list[list[Value]]
    lines: list[list[Value]] | None = None  # for the CSV, where it says more than the rows; the first is its header

    def strings(self) -> list[list[str]]:
        return [[_shown(value) for value in row] for row in self.rows]


def code(text: str) -> str:
    """As it stands, in Markdown; what holds backticks is set in more of them."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if text[:1] == "`" or text[-1:] == "`" else f"{fence}{text}{fence}"


def _shown(value: Value) -> str:
    if value is None or value != value:
        return MISSING
    if isinstance(value, Share):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def markdown(table: Table) -> str:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in table.strings()]
    return f"## {table.title}\n\n{table.note}\n\n{markdown_table(table.header, rows)}"


def as_csv(table: Table) -> str:
    """In full precision; what is missing is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for line in table.lines or [list[Value](table.header), *table.rows]:
        writer.writerow("" if value is None or value != value else _bare(value) for value in line)
    return file.getvalue()


def _bare(value: Value) -> Value:
    return float(value) if isinstance(value, Share) else value
