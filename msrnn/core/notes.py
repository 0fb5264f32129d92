"""Notes on standard error: remarks of one line, and a line while something loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def note(text: str) -> None:
    """Print a remark without markup: it may contain file names and model text."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def showing() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows a line on a terminal, in place of the one before; the last one is cleared."""
    stream = sys.stderr  # loading may redirect it

    def show(text: str) -> None:
        if stream.isatty():
            stream.write(f"\r\033[K{text}")
            stream.flush()

    try:
        yield show
    finally:
        show("")


@contextmanager
def loading(what: str) -> Iterator[Callable[[str], None]]:
    """Show a line while something loads, and clear it afterwards. Yields a function that prints a remark instead."""
    with showing() as show:

        def remark(text: str) -> None:
            show("")
            note(text)

        show(f"loading {what} …")
        yield remark
