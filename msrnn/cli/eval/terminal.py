"""Tables and progress of evaluations on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from msrnn.cli.terminal import note, progress

if TYPE_CHECKING:
    from msrnn.evaluate.perplexity.report import Report

TOGETHER = 4  # sizes side by side, so that a part fits a narrow terminal


def show(report: Report, title: str) -> None:
    from msrnn.evaluate.perplexity.report import shown, shown_ratio

    show_table(f"perplexity of {title}", report.grid.headers, report.perplexities(shown))
    if report.compared:
        against = f"perplexity against {report.against} at the same size, on the same chunks"
        show_table(against, report.grid.headers, report.differences(shown_ratio))


def show_table(title: str, names: Sequence[str], rows: list[list[str]]) -> None:
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


def watched(run: Any, cells: list[Any]) -> Any:
    """A run's results, with a bar that counts the tokens still to be read and names the cell that reads them."""
    from msrnn.evaluate.watch import Watch

    with progress() as bar:
        task = bar.add_task("", total=None)

        def on_cell(cell: Any) -> None:
            named = f"{cell.label} ({cells.index(cell) + 1} of {len(cells)})" if cell in cells else cell.label
            bar.update(task, description=named)
            if bar.disable:
                note(named)

        def on_total(tokens: int) -> None:
            bar.update(task, total=tokens)
            if not tokens:
                note("nothing left to compute")

        return run.results(cells, Watch(on_total, on_cell, partial(bar.advance, task)))
