"""What the terminal shows beside the model's own text: remarks and progress go to standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from msrnn.core.state import MultiState


class Stopped(Exception):  # noqa: N818, it is no error
    """Ctrl-C, with what was kept and how to go on; the command line shows it and ends with exit code 130."""


def note(text: str) -> None:
    """A remark, as it is: file names and model text are no markup."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def loading(what: str) -> Iterator[Callable[[str], None]]:
    """A line on the terminal while something loads, gone afterwards; yields what writes a remark in its place."""
    stream = sys.stderr  # loading may redirect it
    shown = stream.isatty()

    def show(text: str) -> None:
        if shown:
            stream.write(text)
            stream.flush()

    def remark(text: str) -> None:
        show("\r\033[K")
        note(text)

    show(f"loading {what} …")
    try:
        yield remark
    finally:
        show("\r\033[K")


class _Speed(ProgressColumn):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {self.what}/s" if speed else "")


def progress(what: str = "tokens") -> Progress:
    """A bar that counts tokens, or others; nothing where standard error is no terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Speed(what), TimeRemainingColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal)


def states_held(state: MultiState) -> int:
    """The most states that a head of any layer holds."""
    return max(int((layer.position >= 0).sum(-1).max()) for layer in state.layers if hasattr(layer, "position"))


def summary(state: MultiState) -> str:
    seen, held = int(state.seen[0]), states_held(state)
    return f"{seen:,} tokens read, {held:,} states held in each layer, {decimal(state.nbytes)}"
