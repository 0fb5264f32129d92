"""Terminal output: tables and wrapped text on standard output, remarks and progress bars on standard error."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from msrnn.core.notes import note as note

if TYPE_CHECKING:
    from msrnn.cli.answer_streamer import AnswerStreamer
    from msrnn.core.state import MultiState

_COLUMN_FRAME = 3  # padding of a table's column and the line next to it; one more line ends the table


class Stopped(Exception):  # noqa: N818, it is not an error
    """Ctrl-C, with what was saved and how to continue. The command line prints it and exits with code 130."""


def quiet_torchao() -> None:
    """Drop remarks about torchao, which transformers imports with every model where it is installed.

    It has kernels for GPUs, which do not load on a machine without one.
    """
    for name in ("torch.utils._pytree", "torchao"):
        logging.getLogger(name).addFilter(_is_worth_showing)


def _is_worth_showing(record: logging.LogRecord) -> bool:
    return not re.search(r"is an Enum subclass|^Failed to load .*\.so:", str(record.msg))


class _Speed(ProgressColumn):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {self.what}/s" if speed else "")


def progress(what: str = "tokens") -> Progress:
    """A bar that counts tokens, or another unit; disabled if standard error is not a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Speed(what), TimeRemainingColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal)


def summary(state: MultiState) -> str:
    from msrnn.evaluation.loss import count_rows

    held = count_rows(state)
    each = f"{held[0]:,} KV rows held in each layer"
    if len(set(held)) > 1:
        each = f"{sum(held):,} KV rows held, {sum(held) / len(held):,.0f} in a layer on average"
    more = f", and an archive of {decimal(state.archive_nbytes)}" if state.archive_nbytes else ""
    if dropped := max(state.dropped_tokens):
        more += f" without the first {dropped:,} tokens"
    return f"{int(state.seen[0]):,} tokens read, {each}, {decimal(state.nbytes)}{more}"


def note_dropped(state: MultiState, before: int = 0) -> int:
    """Say that the archive has dropped more than `before` tokens, if it has -> how many."""
    dropped = max(state.dropped_tokens)
    if dropped > before:
        note(f"the archive no longer has the first {dropped:,} tokens: --archive-bytes had no room for them")
    return dropped


def speed_of(answer: AnswerStreamer) -> str:
    """Tokens generated, and tokens per second after the first."""
    count, speed = len(answer.ids), answer.tokens_per_second
    return f"{count:,} token{'s' if count != 1 else ''}" + ("" if speed is None else f", {speed:,.1f} tokens/s")


def show_text(text: str, indent: int = 0) -> None:
    """Print lines that break between words and never inside one, so that a path can be copied."""
    width, front = Console().width, " " * indent
    for line in text.split("\n"):
        broken = wrap(line, max(1, width - indent), break_long_words=False, break_on_hyphens=False)
        print("\n".join(front + part for part in broken))


def show_table(title: str, names: Sequence[str], rows: list[list[str]]) -> None:
    """Print a table, in several parts if it is too wide; each part repeats the first column.

    Cells are printed without markup. If two columns are too wide for one part, their lines are folded.
    """
    console = Console()
    widths = [max(map(_width, cells)) for cells in zip(names, *rows, strict=True)]
    if title:
        print()
        show_text(title)
    for columns in _parts(widths, console.width):
        table = Table(box=SIMPLE_HEAD)
        table.add_column(Text(names[0]), overflow="fold")
        for name in names[columns]:
            table.add_column(Text(name), justify="right", overflow="fold")
        for cells in rows:
            table.add_row(*map(Text, [cells[0], *cells[columns]]))
        console.print(table)


def _width(cell: str) -> int:
    return max(map(cell_len, cell.split("\n")))


def _parts(widths: Sequence[int], console_width: int) -> Iterator[slice]:
    """The columns after the first, in parts that fit next to it; each part has at least one."""
    first = widths[0] + _COLUMN_FRAME + 1
    start, used = 1, first
    for column in range(1, len(widths)):
        used += widths[column] + _COLUMN_FRAME
        if used > console_width and column > start:
            yield slice(start, column)
            start, used = column, first + widths[column] + _COLUMN_FRAME
    if start < len(widths):
        yield slice(start, len(widths))


def quiet() -> None:
    """Silence warnings of transformers about long texts, and of the hub about retries."""
    import huggingface_hub
    import transformers

    loggers: tuple[Any, Any] = transformers.logging, huggingface_hub.logging
    for logger in loggers:
        logger.set_verbosity_error()
