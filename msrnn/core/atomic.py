"""Atomic file writes: a file is written completely or not at all, and by whom it may be read."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from msrnn.errors import FileError

PRIVATE = 0o600  # of files that hold a user's text: the owner alone
_UNFINISHED = ".tmp"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def target_of(path: Path) -> Path:
    """The file that a write to `path` replaces: a symbolic link stays, and the file that it names is replaced.

    Refuses anything but a regular file, and a folder that does not exist.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        what = "is not a folder; name another file" if target.parent.exists() else "does not exist; create it first"
        raise FileError(f"the folder {target.parent} {what}", path)
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
        raise FileError(kind, path, advice="name a file to save to")
    return target


def write_atomically(path: Path, write: Callable[[Path], None], mode: int = 0o666) -> None:
    """`write` fills a temporary file next to `path`, which then takes its place: an interruption loses nothing.

    A new file gets the permissions `mode` less the umask. A replaced file keeps its own as far as `mode` allows.
    The temporary file is in a folder of its own, which others cannot enter, since safetensors makes a temporary file
    with a name of its own next to it.
    """
    target = target_of(path)
    name = os.fsdecode(os.fsencode(target.name)[:200])  # a name has 255 bytes at most
    with tempfile.TemporaryDirectory(_UNFINISHED, f".{name}.", target.parent) as folder:
        temporary = Path(folder) / "file"
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(target.stat().st_mode & mode if target.exists() else _mode_of_new_file(Path(folder), mode))
        temporary.replace(target)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: what is done afterwards is not there without them."""
    if os.name == "nt":  # which cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter, for files that hold a user's text; an existing one stays as is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def remove_unfinished(folder: Path, ours: Callable[[str], bool]) -> None:
    """Remove the unfinished files of a process that was killed; `ours` decides by the name of a file."""
    for path in folder.glob(f".*.*{_UNFINISHED}"):
        name = path.name[1:].removesuffix(_UNFINISHED).rpartition(".")[0]
        if ours(name) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif ours(name):  # of an earlier version
            path.unlink(missing_ok=True)


def _mode_of_new_file(folder: Path, mode: int) -> int:
    """The permissions that the system gives to a new file. Asking for the umask would set it for all threads."""
    descriptor = os.open(folder / "mode", os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
