"""Rows of JSON in a file that only grows: what a run has computed outlives it, however it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from msrnn.core.atomic import write_atomically
from msrnn.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows: two processes on one file are not kept apart
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]
Check = Callable[[Row], str | None]  # what is wrong with a row; None: nothing
_ABSENT = object()


class Store:
    """The rows of a file, which need not exist yet; without a file, rows of this run alone.

    The caller says which fields identify a result. Of several rows with one identity the newest counts, so a result
    is replaced by appending another: an interruption loses neither. With `redo`, `done` has only rows of this run.
    """

    def __init__(
        self, path: Path | None, check: Check = lambda _: None, *, redo: bool = False, skip_damaged: bool = False
    ) -> None:
        self.path = path
        self.rows = read_rows(path, check, skip_damaged) if path and path.exists() else []
        self._old = len(self.rows) if redo else 0

    def matching(self, key: Row) -> list[Row]:
        """Rows that have all of these fields, with these values, in the order they were written."""
        return _matching(self.rows, key)

    def done(self, key: Row) -> list[Row]:
        """Of the matching rows, those that need not be computed again."""
        return _matching(self.rows[self._old :], key)

    def append(self, row: Row) -> None:
        """On return the row is on the disk, so that no interruption can take it."""
        if self.path:
            with _locked(self.path) as file:
                file.write(json.dumps(row).encode() + b"\n")
                _sync(file)
        self.rows.append(row)


def _matching(rows: list[Row], key: Row) -> list[Row]:
    return [row for row in rows if all(row.get(name, _ABSENT) == value for name, value in key.items())]


class _Line(NamedTuple):
    number: int
    text: bytes
    row: Row
    damage: str | None


def read_rows(path: Path, check: Check = lambda _: None, skip_damaged: bool = False) -> list[Row]:
    """All whole lines, without a last one that an interruption cut off.

    A damaged line is an error that names it. With `skip_damaged` all such lines move to another file beside this one.
    """
    lines = _lines(path.read_bytes(), check)
    damaged = [line for line in lines if line.damage]
    if not damaged:
        return [line.row for line in lines]
    if not skip_damaged:
        first, more = damaged[0], f" (and {len(damaged) - 1} more lines)" if len(damaged) > 1 else ""
        raise UsageError(
            f"{path}, line {first.number}: damaged, {first.damage}{more}; mend it, or add --skip-damaged to go on "
            f"without it (a copy is kept in {side_file(path).name})"
        )
    return _without_damage(path, check)


def side_file(path: Path) -> Path:
    """Where damaged lines are moved to."""
    return path.with_suffix(".damaged")


def _lines(data: bytes, check: Check) -> list[_Line]:
    *texts, _ = data.split(b"\n")
    return [_line(number, text, check) for number, text in enumerate(texts, start=1)]


def _line(number: int, text: bytes, check: Check) -> _Line:
    try:
        row = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        return _Line(number, text, {}, f"not JSON ({getattr(error, 'msg', None) or type(error).__name__})")
    if not isinstance(row, dict):
        return _Line(number, text, {}, "not a JSON object")
    return _Line(number, text, row, check(row))


def _without_damage(path: Path, check: Check) -> list[Row]:
    with _locked(path) as file:
        file.seek(0)
        lines = _lines(file.read(), check)
        with side_file(path).open("ab") as side:
            side.writelines(line.text + b"\n" for line in lines if line.damage)
            _sync(side)
        whole = [line for line in lines if not line.damage]

        def write(to: Path) -> None:
            to.write_bytes(b"".join(line.text + b"\n" for line in whole))

        write_atomically(path, write)
    return [line.row for line in whole]


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file, open for appending by this process alone, and ending with a whole line.

    Who waited for the lock may hold a file that was replaced meanwhile, and opens the new one.
    """
    while True:
        with path.open("a+b") as file:
            if fcntl:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue
            _cut_partial_line(file)
            yield file
            return


def _cut_partial_line(file: BinaryIO) -> None:
    """A last line without its end was cut off by a kill or a full disk: nobody else writes while this is locked."""
    end = file.seek(0, os.SEEK_END)
    if not end:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
