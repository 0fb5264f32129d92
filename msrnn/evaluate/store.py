"""Rows of JSON that are only ever added to: what a run has found outlives it, however it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from msrnn.files import write_atomically

Row = dict[str, Any]
_ABSENT = object()


class Store:
    """The rows of a file, which need not exist yet; without a file, rows of this run alone.

    Rows are not told apart here: whoever asks says which of their fields identify a result, and the rest of a row
    is there to be read beside it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows = read_rows(path) if path and path.exists() else []

    def matching(self, key: Row) -> list[Row]:
        """Rows that have all of these fields, with these values, in the order they were written."""
        return [row for row in self.rows if all(row.get(name, _ABSENT) == value for name, value in key.items())]

    def append(self, row: Row) -> None:
        """On return the row is on the disk, so that no interruption can take it."""
        self.rows.append(row)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """All whole lines. A last line that an interruption cut off is taken out of the file."""
    *lines, rest = path.read_bytes().decode(errors="replace").split("\n")
    try:
        rows = [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not rows that msrnn wrote ({error.msg}); use --force to start anew") from error
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: not rows that msrnn wrote; use --force to start anew")
    if rest:
        _rewrite(path, "".join(f"{line}\n" for line in lines))
    return rows


def _rewrite(path: Path, text: str) -> None:
    def write(to: Path) -> None:
        to.write_text(text)

    write_atomically(path, write)
