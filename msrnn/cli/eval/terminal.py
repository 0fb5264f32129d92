"""Tables of policies and sizes on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from msrnn.evaluate.perplexity.report import Report

TOGETHER = 4  # sizes side by side, so that a part fits a narrow terminal


def show(report: Report, title: str) -> None:
    from msrnn.evaluate.perplexity.report import headers, shown, shown_ratio

    print_table(f"perplexity of {title}", headers(report), report.perplexities(shown))
    if report.compared:
        against = f"perplexity against {report.against} at the same size, on the same chunks"
        print_table(against, headers(report), report.differences(shown_ratio))


def print_table(title: str, names: Sequence[str], rows: list[list[str]]) -> None:
    """In parts that fit, each with the first column; strings are shown as they are."""
    console = Console()
    for start in range(1, len(names), TOGETHER):
        columns = slice(start, start + TOGETHER)
        table = Table(title=title if start == 1 else None, box=SIMPLE_HEAD)
        table.add_column(names[0], no_wrap=True)
        for name in names[columns]:
            table.add_column(name, justify="right", no_wrap=True)
        for cells in rows:
            table.add_row(*map(escape, [cells[0], *cells[columns]]))
        console.print(table)
