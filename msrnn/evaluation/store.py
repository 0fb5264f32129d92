"""Results as records of JSON in a file that is only appended to."""

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

Record = dict[str, Any]
Check = Callable[[Record], str | None]  # what is wrong with a record; None: nothing
_ABSENT = object()


class DamagedRecordsError(UsageError):
    """Lines of a store that cannot be read, or that lack a field."""


class Store:
    """The records of a file, which need not exist yet; without a file, the records of this run.

    The caller says which fields identify a result. Of several records with one identity the newest counts, so a result
    is replaced by appending another, and an interruption loses neither. With `redo`, `done` has only records of this
    run. Of several processes that compute the same records, only one `writes`.
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
        self.records = read_records(path, check, skip_damaged) if path and path.exists() else []
        self._old = len(self.records) if redo else 0

    def matching(self, key: Record) -> list[Record]:
        """Records whose fields have these values, oldest first."""
        return _matching(self.records, key)

    def find_done(self, key: Record) -> list[Record]:
        """Of the matching records, those that need not be computed again."""
        return _matching(self.records[self._old :], key)

    def append(self, record: Record) -> None:
        """Write a record; on return it is on the disk."""
        if self.path and self._writes:
            with _lock(self.path) as file:
                file.write(json.dumps(record).encode() + b"\n")
                _sync(file)
        self.records.append(record)


def _matching(records: list[Record], key: Record) -> list[Record]:
    return [record for record in records if all(record.get(name, _ABSENT) == value for name, value in key.items())]


class _Line(NamedTuple):
    number: int
    text: bytes
    record: Record
    damage: str | None


def read_records(path: Path, check: Check = lambda _: None, skip_damaged: bool = False) -> list[Record]:
    """The records of all complete lines; an interruption may have cut off the last one.

    Raises DamagedRecordsError for a damaged line. With `skip_damaged`, damaged lines are moved to another file.
    """
    lines = _lines(path.read_bytes(), check)
    damaged = [line for line in lines if line.damage]
    if not damaged:
        return [line.record for line in lines]
    if not skip_damaged:
        first, more = damaged[0], f" (and {len(damaged) - 1} more lines)" if len(damaged) > 1 else ""
        raise DamagedRecordsError(
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
        record = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        return _Line(number, text, {}, f"not JSON ({getattr(error, 'msg', None) or type(error).__name__})")
    if not isinstance(record, dict):
        return _Line(number, text, {}, "not a JSON object")
    return _Line(number, text, record, check(record))


def _without_damage(path: Path, check: Check) -> list[Record]:
    with _lock(path) as file:
        file.seek(0)
        lines = _lines(file.read(), check)
        with side_file(path).open("ab") as side:
            side.writelines(line.text + b"\n" for line in lines if line.damage)
            _sync(side)
        whole = [line for line in lines if not line.damage]

        def write(to: Path) -> None:
            to.write_bytes(b"".join(line.text + b"\n" for line in whole))

        write_atomically(path, write)
    return [line.record for line in whole]


@contextmanager
def _lock(path: Path) -> Iterator[BinaryIO]:
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
