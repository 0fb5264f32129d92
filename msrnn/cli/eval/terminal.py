"""Tables and progress of evaluations on the terminal."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from msrnn.cli.results import resumed
from msrnn.cli.terminal import note, progress, show_table

if TYPE_CHECKING:
    from msrnn.evaluation.perplexity.report import Report


def show(report: Report, title: str) -> None:
    from msrnn.evaluation.perplexity.report import shown, shown_ratio

    show_table(f"perplexity of {title}", report.grid.headers, report.perplexities(shown))
    if report.compared:
        against = f"perplexity against {report.against} at the same size, on the same chunks"
        show_table(against, report.grid.headers, report.differences(shown_ratio))


def watched(run: Any, cells: list[Any]) -> Any:
    """A run's results, with a bar that counts the tokens still to be read and names the cell that reads them."""
    from msrnn.evaluation.watch import Watch

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

        return run.results(cells, Watch(on_total, on_cell, partial(bar.advance, task), resumed))
