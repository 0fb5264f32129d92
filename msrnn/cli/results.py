"""The folder of an evaluation: checked before anything is computed, resumed, and filled with tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn.cli.terminal import note
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.evaluation.store import Check, Store

SkipDamaged = Annotated[
    bool, Option("--skip-damaged", help="Go on without damaged lines of the folder's .jsonl; a copy is kept beside it.")
]


def open_store(folder: Path, name: str, check: Check, *, force: bool, skip_damaged: bool) -> Store:
    """NAME.jsonl in a folder that exists from now on; with `force` what it has counts as not computed."""
    from msrnn.evaluation.store import Store

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder}: a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return Store(folder / f"{name}.jsonl", check, redo=force, skip_damaged=skip_damaged)


@contextmanager
def stoppable(force: bool = False, kept: bool = True) -> Iterator[None]:
    """Says on Ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if not kept:
            note("stopped; nothing is kept without --out")
        elif force:
            note("stopped; what was computed is kept. Run the same command without --force to use it with older rows")
        else:
            note("stopped; run the same command to continue")
        raise


def resumed(done: int, total: int, what: str) -> None:
    if done:
        note(f"{done:,} of {total:,} {what} already done")


def shown_as_well(labels: Sequence[str], left_out: int) -> None:
    """What else the folder has, and whether the tables show it."""
    if labels:
        note(f"the tables also show {', '.join(labels)}, from earlier commands")
    if left_out:
        note(f"{left_out:,} rows of other models, dtypes or data are in the folder, but not in these tables")


def drawn(draw: Callable[[], object]) -> tuple[str, ...]:
    """The kinds of files that were drawn: none where matplotlib is missing."""
    from msrnn.evaluation.figures import has_matplotlib

    if not has_matplotlib():
        note("no figures: matplotlib is not installed; pip install 'msrnn[plots]' then run the same command again")
        return ()
    draw()
    return ("png", "svg")


def written(folder: Path, name: str, kinds: Sequence[str]) -> None:
    note(f"written to {folder}: " + ", ".join(f"{name}.{kind}" for kind in kinds))
