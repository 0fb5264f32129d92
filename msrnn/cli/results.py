"""The folder of an evaluation: opened and resumed, and filled with tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn.cli.terminal import note, show_table
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.evaluation.report import Table
    from msrnn.evaluation.store import Check, Store

SkipDamaged = Annotated[
    bool, Option("--skip-damaged", help="Move damaged lines of the folder's .jsonl to another file, and continue.")
]


def open_store(folder: Path, name: str, check: Check, *, force: bool, skip_damaged: bool) -> Store:
    """NAME.jsonl in a folder, which is made where it is missing; with `force` its rows count as not computed."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder}: a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return read_store(folder / f"{name}.jsonl", check, force=force, skip_damaged=skip_damaged)


def read_store(path: Path, check: Check, *, force: bool = False, skip_damaged: bool) -> Store:
    """The rows of a file; an error about damaged lines names the option that skips them."""
    from msrnn.evaluation.store import DamagedRowsError, Store

    try:
        return Store(path, check, redo=force, skip_damaged=skip_damaged)
    except DamagedRowsError as error:
        raise UsageError(f"{error}: add --skip-damaged") from error


@contextmanager
def stoppable(force: bool = False, kept: bool = True) -> Iterator[None]:
    """On Ctrl-C, print how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        if not kept:
            note("stopped; without --out nothing is kept")
        elif force:
            note("stopped; what was computed is kept. Run the same command without --force to use it with older rows")
        else:
            note("stopped; run the same command to continue")
        raise


def resumed(done: int, total: int, what: str) -> None:
    if done:
        note(f"{done:,} of {total:,} {what} already done")


def note_other_rows(labels: Sequence[str], left_out: int) -> None:
    """Note what else the folder has: rows that the tables show as well, and the number of those they do not."""
    if labels:
        note(f"the tables also show {', '.join(labels)}, from earlier commands")
    if left_out:
        note(f"{left_out:,} rows of other models, dtypes or data are in the folder, but not in these tables")


def show_tables(tables: Sequence[Table]) -> None:
    for table in tables:
        show_table(table.title, table.header, table.strings())


def write_report(folder: Path, table: Table, page: str, draw: Callable[[], object] | None = None) -> None:
    """NAME.md, NAME.csv where the table has lines for it, and the figures that `draw` draws."""
    kinds = ["jsonl", "md"]
    (folder / f"{table.name}.md").write_text(page)
    if table.lines:
        (folder / f"{table.name}.csv").write_text(table.csv())
        kinds.append("csv")
    if draw:
        kinds += drawn(draw)
    note(f"written to {folder}: " + ", ".join(f"{table.name}.{kind}" for kind in kinds))


def drawn(draw: Callable[[], object]) -> tuple[str, ...]:
    """Draw figures; the kinds of their files, none without matplotlib."""
    from msrnn.evaluation import report

    if not report.has_matplotlib():
        note("no figures: matplotlib is not installed; pip install 'msrnn[plots]' then run the same command again")
        return ()
    draw()
    return ("png", "svg")
