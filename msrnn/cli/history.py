"""Line editing in a conversation, and the lines of earlier ones; both only at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msrnn.cli.saving import state_folder
from msrnn.cli.terminal import note
from msrnn.core.atomic import write_atomically

LINES = 1000


@contextmanager
def history() -> Iterator[None]:
    """`input` edits lines and knows earlier ones, where standard input is a terminal and Python has readline."""
    readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
    if readline is None:
        yield
        return
    try:
        path = state_folder() / "chat_history"
        _load(readline, path)
    except (OSError, RuntimeError) as error:  # no home, or a file that cannot be read
        note(f"earlier lines cannot be read ({error})")
        yield
        return
    known = readline.get_current_history_length()
    try:
        yield
    finally:
        _add(readline, path, known)


def _readline() -> Any:
    try:
        import readline
    except ImportError:
        return None
    return readline


def _load(readline: Any, path: Path) -> None:
    readline.clear_history()
    if path.exists():
        readline.read_history_file(path)


def _add(readline: Any, path: Path, known: int) -> None:
    """Add the lines after the first `known` to what the file has by now: another conversation may have ended."""
    new = [readline.get_history_item(n) for n in range(known + 1, readline.get_current_history_length() + 1)]
    if not new:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _load(readline, path)
        for line in new:
            readline.add_history(line)
        readline.set_history_length(LINES)
        write_atomically(path, readline.write_history_file, mode=0o600)
    except (OSError, ValueError) as error:
        note(f"lines are not kept for the next conversation ({error})")
