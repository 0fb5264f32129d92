"""Line editing in `msrnn chat`, and a file with the lines of earlier conversations; both only in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msrnn.cli.state_files import user_state_folder
from msrnn.cli.terminal import note
from msrnn.core.atomic import write_atomically

MOST_LINES = 1000


@contextmanager
def line_history() -> Iterator[None]:
    """Let `input` edit lines and recall earlier ones, if standard input is a terminal and Python has readline."""
    readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
    if readline is None:
        yield
        return
    try:
        path = user_state_folder() / "chat_history"
        _load(readline, path)
    except (OSError, RuntimeError) as error:  # no home folder, or a file that cannot be read
        note(f"earlier lines cannot be read ({error})")
        yield
        return
    loaded = readline.get_current_history_length()
    try:
        yield
    finally:
        _append(readline, path, loaded)


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


def _append(readline: Any, path: Path, loaded: int) -> None:
    """Append the lines after the first `loaded` to the file as it is now: another chat may have written to it."""
    new = [readline.get_history_item(n) for n in range(loaded + 1, readline.get_current_history_length() + 1)]
    if not new:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _load(readline, path)
        for line in new:
            readline.add_history(line)
        readline.set_history_length(MOST_LINES)
        write_atomically(path, readline.write_history_file, mode=0o600)
    except (OSError, ValueError) as error:
        note(f"the lines of this conversation are not saved ({error})")
