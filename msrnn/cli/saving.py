"""Where states are kept: what may be replaced, and what becomes of a state that cannot be written where it should."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrnn.core.atomic import target_of
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.core.state import MultiState


def check_target(path: Path | None, force: bool = False, inputs: Iterable[str | Path | None] = ()) -> None:
    """Whether a file can be saved there: better known before the work than after it.

    `inputs` are what the command reads (`-`: standard input; a folder: the files in it), and are never replaced.
    """
    if path is None:
        return
    target = target_of(path)
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"{path}: the folder {target.parent} cannot be written to")
    if not target.exists():
        return
    for source in inputs:
        if source is not None and _reads(source, target):
            raise UsageError(f"{path}: is read by this command, as {source}; name another file to save to")
    if not force:
        raise UsageError(f"{path}: exists already; add --force to replace it, or name another file")


def partial_of(target: Path) -> Path:
    """Where a checkpoint lies while that file is being made."""
    return target.with_name(f"{target.name}.partial")


def same_file(one: Path | None, other: Path | None) -> bool:
    """By links of either kind, too."""
    return bool(one and other and one.exists() and other.exists() and one.samefile(other))


def _reads(source: str | Path, target: Path) -> bool:
    if source == "-":
        try:
            return os.path.samestat(os.fstat(sys.stdin.fileno()), target.stat())
        except (OSError, ValueError):  # no file of the system
            return False
    path = Path(source).expanduser()
    files = path.iterdir() if path.is_dir() else [path]
    return any(same_file(file, target) for file in files)


def keep(state: MultiState, path: Path, notes: dict[str, Any] | None = None) -> None:
    """Save a state. Where that fails, as on a full disk, save it elsewhere, and raise an error that says where."""
    try:
        state.save(path, notes)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = reason.removeprefix(f"{path}: ")
        for other in _elsewhere(path.name):
            try:
                state.save(other, notes)
            except (OSError, ValueError):
                continue
            raise UsageError(f"{path}: {reason}; the state is kept as {other}, move it from there") from error
        raise UsageError(f"{path}: {reason}") from error


def _elsewhere(name: str) -> Iterator[Path]:
    """Files that do not exist yet: in the user's folder for state, and in the folder for temporary files."""
    for folder in (state_folder, lambda: Path(tempfile.gettempdir())):
        try:
            made = folder()
            made.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # no home, or none that can be written to
            continue
        numbered = (made / (f"{name}.{n}" if n else name) for n in range(1000))
        yield next(path for path in numbered if not path.exists())


def state_folder() -> Path:
    """What the command line remembers of a user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "msrnn"
