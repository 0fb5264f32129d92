"""Notes on standard error: remarks of one line, and a line while something loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def note(text: str) -> None:
    """Print a remark without markup: it may contain file names and model text."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def loading(what: str) -> Iterator[Callable[[str], None]]:
    """Show a line while something loads, and clear it afterwards. Yields a function that prints a remark instead."""
    stream = sys.stderr  # loading may redirect it
    is_terminal = stream.isatty()

    def show(text: str) -> None:
        if is_terminal:
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
