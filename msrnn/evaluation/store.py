"""Results as rows of JSON in a file that is only appended to."""

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
except ImportError:  # Windows: no locks, so two processes must not write to one file
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]
Check = Callable[[Row], str | None]  # what is wrong with a row; None: nothing
_ABSENT = object()


class DamagedRowsError(UsageError):
    """Lines of a store that cannot be read, or that lack a field."""


class Store:
    """The rows of a file, which need not exist yet; without a file, the rows of this run.

    The caller says which fields identify a result. Of several rows with one identity the newest counts, so a result
    is replaced by appending another, and an interruption loses neither. With `redo`, `done` has only rows of this run.
    Of several processes that compute the same rows, only one `writes`.
    """

    def __init__(
        self,
        path: Path | None,
        check: Check = lambda _: None,
        *,
        redo: bool = False,
        skip_damaged: bool = False,
        writes: bool = True,
    ) -> None:
        self.path, self._writes = path, writes
        self.rows = read_rows(path, check, skip_damaged) if path and path.exists() else []
        self._old = len(self.rows) if redo else 0

    def matching(self, key: Row) -> list[Row]:
        """Rows whose fields have these values, oldest first."""
        return _matching(self.rows, key)

    def done(self, key: Row) -> list[Row]:
        """Of the matching rows, those that need not be computed again."""
        return _matching(self.rows[self._old :], key)

    def append(self, row: Row) -> None:
        """Write a row; on return it is on the disk."""
        if self.path and self._writes:
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
    """The rows of all complete lines; an interruption may have cut off the last one.

    Raises DamagedRowsError for a damaged line. With `skip_damaged`, damaged lines are moved to another file.
    """
    lines = _lines(path.read_bytes(), check)
    damaged = [line for line in lines if line.damage]
    if not damaged:
        return [line.row for line in lines]
    if not skip_damaged:
        first, more = damaged[0], f" (and {len(damaged) - 1} more lines)" if len(damaged) > 1 else ""
        raise DamagedRowsError(
            f"{path}, line {first.number}: damaged, {first.damage}{more}; repair it, or skip damaged lines "
            f"(they are moved to {side_file(path).name})"
        )
    return _without_damage(path, check)


def side_file(path: Path) -> Path:
    """The file that damaged lines are moved to."""
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
    """The file, locked by this process and open for appending, its last line complete.

    While this process waits for the lock, another may replace the file: then the new one is opened.
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
    """Remove an incomplete last line, left by a kill or a full disk: no process is writing while the file is locked."""
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
