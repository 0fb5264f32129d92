"""Tables and sentences on the terminal, however narrow it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

FRAME = 3  # of a column: its padding, and the line beside it; one more line ends the table


def show_text(text: str, indent: int = 0) -> None:
    """Lines that break between words, and never inside one: a path can be copied."""
    width, front = Console().width, " " * indent
    for line in text.split("\n"):
        broken = wrap(line, max(1, width - indent), break_long_words=False, break_on_hyphens=False)
        print("\n".join(front + part for part in broken))


def show_table(title: str, names: Sequence[str], rows: list[list[str]]) -> None:
    """In parts that fit, each with the first column; strings are shown as they are.

    Where the first column and another one do not fit together, their lines are folded.
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


def _parts(widths: Sequence[int], room: int) -> Iterator[slice]:
    """As many columns at a time as fit beside the first one, and at least one."""
    alone = widths[0] + FRAME + 1
    start, taken = 1, alone
    for column in range(1, len(widths)):
        taken += widths[column] + FRAME
        if taken > room and column > start:
            yield slice(start, column)
            start, taken = column, alone + widths[column] + FRAME
    if start < len(widths):
        yield slice(start, len(widths))
