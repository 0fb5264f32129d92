"""The folder that a command writes to: a store of records, tables as .md and .csv, and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrnn.cli.terminal import note, show_table
from msrnn.core.torchrun import is_first
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.evaluation.api.result import EvaluationResult
    from msrnn.evaluation.report import Table
    from msrnn.evaluation.store import Check, Store


def open_store(folder: Path, name: str, check: Check, *, force: bool, skip_damaged: bool) -> Store:
    """NAME.jsonl in a folder, which is made where it is missing; with `force` its records count as not computed."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder}: a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return read_store(folder / f"{name}.jsonl", check, force=force, skip_damaged=skip_damaged)


def read_store(path: Path, check: Check, *, force: bool = False, skip_damaged: bool) -> Store:
    """The records of a file; an error about damaged lines names the option that skips them."""
    from msrnn.evaluation.store import DamagedRecordsError, Store

    try:
        return Store(path, check, redo=force, skip_damaged=skip_damaged, writes=is_first())
    except DamagedRecordsError as error:
        raise UsageError(f"{error}: add --skip-damaged") from error


def report(result: EvaluationResult[Any], folder: Path) -> None:
    """Print the tables, and write them and the figure."""
    note_other_records(result.others, result.left_out)
    show_tables(result.tables)
    write_report(folder, result.table, result.page, partial(result.draw, folder) if result.draw else None)


def note_other_records(labels: Sequence[str], left_out: int) -> None:
    """Note what else the folder has: cells that the tables show as well, and the number of records they do not."""
    if labels:
        note(f"the tables also show {', '.join(labels)}, from earlier commands")
    if left_out:
        note(f"{left_out:,} records of other models, dtypes or data are in the folder, but not in these tables")


def show_tables(tables: Sequence[Table]) -> None:
    for table in tables:
        show_table(table.title, table.header, table.strings())


def write_report(folder: Path, table: Table, page: str, draw: Callable[[], object] | None = None) -> None:
    """NAME.md, NAME.csv where the table has lines for it, and the figures that `draw` draws."""
    if not is_first():
        return
    kinds = ["jsonl", "md"]
    (folder / f"{table.name}.md").write_text(page)
    if table.lines:
        (folder / f"{table.name}.csv").write_text(table.csv())
        kinds.append("csv")
    if draw:
        kinds += draw_if_possible(draw)
    note(f"written to {folder}: " + ", ".join(f"{table.name}.{kind}" for kind in kinds))


def draw_if_possible(draw: Callable[[], object]) -> tuple[str, ...]:
    """Draw figures; the kinds of their files, none without matplotlib."""
    from msrnn.evaluation import report

    if not report.has_matplotlib():
        note("no figures: matplotlib is not installed; pip install 'msrnn[plots]' then run the same command again")
        return ()
    draw()
    return ("png", "svg")
