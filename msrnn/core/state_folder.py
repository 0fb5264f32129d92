"""A folder of state files, by name: sessions, cached prefixes and the legs of an extrapolation are kept on disk so.

Files are private, and written completely or not at all. A state with an archive may have a folder of segments besides
its file (`segment_folder.py`); both are one state here. The checkpoint of a long read is a single file that the user
names, and is in no such folder. This module does not load torch: saving, loading and describing states is left to an
object such as an executor.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from msrnn.core.atomic import make_private_folder, remove_unfinished, sync_folder
from msrnn.core.segment_folder import (
    SUFFIX,
    find_folder,
    link_segments,
    list_named,
    list_names,
    list_segments,
    move_folder,
    remove_segments,
)
from msrnn.core.shared_sizes import FileSizes, SharedSizes
from msrnn.errors import UsageError

DAMAGED = ".damaged"
_log = logging.getLogger(__name__)
S = TypeVar("S")


class StateFiles(Protocol[S]):
    """Saves states to files and loads them."""

    def save(self, state: S, path: Path, notes: Mapping[str, Any]) -> None: ...
    def load(self, path: Path) -> S: ...
    def describe(self, path: Path) -> dict[str, Any]: ...


class StateNames:
    """State files in a folder, by name; what they hold does not matter. The file of a name is NAME.safetensors.

    is_own  whether a name belongs to this object; all other files of the folder are left alone
    """

    def __init__(self, path: Path, is_own: Callable[[str], bool] = lambda _: True) -> None:
        self.path, self._is_own = path, is_own

    def create(self) -> None:
        """Make the folder, which only its owner can enter; an existing one keeps its permissions."""
        make_private_folder(self.path)

    def path_of(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"

    def __contains__(self, name: str) -> bool:
        return self.path_of(name).exists()

    def list_names(self) -> list[str]:
        return sorted(path.stem for path in self.path.glob(f"*{SUFFIX}") if self._is_own(path.stem))

    def sizes_of(self, name: str) -> FileSizes:
        """Bytes of the files of a name."""
        path = self.path_of(name)
        return FileSizes(path.stat().st_size, list_segments(path))

    def delete(self, name: str) -> None:
        path = self.path_of(name)
        path.unlink(missing_ok=True)
        if find_folder(path).is_dir():
            try:
                sync_folder(self.path)
                remove_segments(path, list_segments(path))
            except OSError as error:  # the state is gone, and the next start removes them
                _log.warning("segments of %s stay: %s", printable(path), printable(error))

    def rename(self, name: str, other: str) -> None:
        """Give a state another name, which no state has; it has one of the two at any moment."""
        link_segments(self.path_of(name), self.path_of(other))
        self.path_of(name).rename(self.path_of(other))
        self.delete(name)

    def remove_unfinished(self) -> None:
        """Remove the unfinished files of a process that was killed."""
        remove_unfinished(self.path, lambda name: name.endswith(SUFFIX) and self._is_own(name.removesuffix(SUFFIX)))

    def set_aside(self, name: str, error: Exception) -> None:
        """Rename a damaged file, so that it is not read again and can be examined."""
        path = self.path_of(name)
        _log.warning("%s cannot be used, and is set aside as *%s: %s", printable(path), DAMAGED, printable(error))
        try:
            move_folder(path, DAMAGED)
            path.rename(path.with_name(path.name + DAMAGED))
        except OSError as cause:
            _log.warning("%s stays where it is: %s", printable(path), printable(cause))


class StateFolder(StateNames, Generic[S]):
    """States and their notes by name.

    files  saves, loads and describes states
    """

    def __init__(self, path: Path, files: StateFiles[S], is_own: Callable[[str], bool] = lambda _: True) -> None:
        super().__init__(path, is_own)
        self._files = files

    def save(self, name: str, state: S, notes: Mapping[str, Any]) -> FileSizes:
        """Write the file of a name, or replace it -> its bytes. Until it is complete, the old file stays."""
        self.create()
        self._files.save(state, self.path_of(name), notes)
        return self.sizes_of(name)

    def load(self, name: str) -> tuple[S, dict[str, Any]]:
        """A state and the description of its file, which has the `notes`. Both are of one version of the file."""
        path = self.path_of(name)
        while True:
            description = self._files.describe(path)
            try:
                state = self._files.load(path)
            except UsageError:
                if self._files.describe(path) == description:
                    raise
                continue
            if self._files.describe(path) == description:  # or else the file was replaced in between
                return state, description

    def describe(self, name: str) -> tuple[dict[str, Any], FileSizes]:
        """The description of a file, unchecked, and the bytes of its files."""
        return self._files.describe(self.path_of(name)), self.sizes_of(name)

    def remove_unfinished(self) -> None:
        """Remove what a process that was killed has left, segments that no file names among it."""
        names = [name for name in list_names(self.path) if self._is_own(name)]
        # Segments are listed before unfinished files are removed. A write that is going on loses its unfinished file,
        # so it fails and names no listed segment; one that begins later has segments that are not listed.
        found = {name: list_segments(self.path_of(name)) for name in names}
        super().remove_unfinished()
        for name in names:
            if (named := self._find_named(name)) is not None:
                remove_segments(self.path_of(name), found[name].keys() - named)

    def _find_named(self, name: str) -> set[str] | None:
        """The segments that the file of a name has, if it is there; None: it cannot be known."""
        path = self.path_of(name)
        if not path.exists():
            return set()
        try:
            return {file.path.name for one in list_named(path, self._files.describe(path)) for file in one}
        except (UsageError, OSError):
            return None


class LimitedStateFolder(StateFolder[S]):
    """A state folder of limited bytes: the least recently used files are deleted first.

    One thread may save while others load. The files are listed once, at the start: no other process may use the folder.

    most  bytes of all files; one more is there while it is written
    """

    def __init__(self, path: Path, files: StateFiles[S], is_own: Callable[[str], bool], most: int) -> None:
        super().__init__(path, files, is_own)
        self._most, self._lock = most, threading.Lock()
        self.create()
        self.remove_unfinished()
        found = sorted((self.path_of(name).stat().st_mtime_ns, name) for name in super().list_names())
        self._names = OrderedDict((name, None) for _, name in found)  # as last used
        self._sizes = SharedSizes[str]()
        for name in self._names:
            self._sizes.set(name, self.sizes_of(name))
        self._make_room()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def nbytes(self) -> int:
        return self._sizes.nbytes

    def list_names(self) -> list[str]:
        return [*self._names]

    def save(self, name: str, state: S, notes: Mapping[str, Any]) -> FileSizes:
        sizes = super().save(name, state, notes)
        self._mark_used(name)
        with self._lock:
            self._sizes.set(name, sizes)
            self._names[name] = None
            self._names.move_to_end(name)
        self._make_room()
        return sizes

    def load(self, name: str) -> tuple[S, dict[str, Any]]:
        """Load a state, which is the most recently used one then, also after a restart."""
        found = super().load(name)
        self._mark_used(name)
        with self._lock:
            if name in self._names:  # or else it was deleted meanwhile, for another one
                self._names.move_to_end(name)
        return found

    def delete(self, name: str) -> None:
        with self._lock:
            self._names.pop(name, None)
            self._sizes.pop(name)
        super().delete(name)

    def _mark_used(self, name: str) -> None:
        """For the order after a restart: the clock of a file system may tick too slowly to tell two uses apart."""
        now = time.time_ns()
        with suppress(FileNotFoundError):  # deleted meanwhile
            os.utime(self.path_of(name), ns=(now, now))

    def _make_room(self) -> None:
        while self.nbytes > self._most:
            self.delete(next(iter(self._names)))


def printable(value: object) -> str:
    """For the log: a file's name may have bytes that are no text."""
    return str(value).encode(errors="backslashreplace").decode()
