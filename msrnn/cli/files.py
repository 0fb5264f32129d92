"""Files of a verb: texts that it reads, which files it may replace, and where it saves a state if a write fails."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrnn.core.atomic import make_private_folder, target_of
from msrnn.core.torchrun import is_torchrun
from msrnn.errors import FileError, UsageError
from msrnn.evaluation.data.texts import decode_utf8

if TYPE_CHECKING:
    from msrnn.core.state import MultiState


MANUAL = "Python's own manual"
_MANUAL_TOPICS = ("objects", "naming", "exceptions", "import", "customization", "attribute-access", "types", "compound")


def read_text(source: str) -> str:
    """The text of a file, or of standard input for `-`."""
    if source == "-" and is_torchrun():
        raise UsageError("-: standard input has one reader, but there are several processes; give a file")
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    text = decode_utf8(data, source)
    if not text.strip():
        raise UsageError(f"{source}: empty; give a text to read")
    return text


def as_utf8(text: str) -> str:
    """A typed text, with a replacement character for each byte that is not UTF-8: tokenizers refuse these."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def manual() -> str:
    """A text that every Python installation has: chapters of its language reference, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in _MANUAL_TOPICS)


def text_or_file(source: str) -> tuple[str, str]:
    """A name and a text: the file of this name if there is one, standard input for `-`, or the argument itself."""
    if source == "-":
        return "text", read_text(source)
    if path := _existing(source):
        if path.is_dir():
            example = next((f", such as {file}" for file in sorted(path.glob("*.txt"))), "")
            raise FileError("a folder", path, advice=f"name a text file in it{example}")
        return path.stem, read_text(source)
    text = as_utf8(source)
    if not text.strip():
        raise UsageError("TEXT|FILE: empty; give a text or a file to read")
    if "\n" not in source and source.endswith((".txt", ".md")):
        raise UsageError(f"{source}: no such file; give an existing file or a text")
    if "\n" not in source and " " not in source.strip():
        raise UsageError(f"{source}: no such file, and a text of one word shows nothing; give a longer text")
    return "text", text


def _existing(source: str) -> Path | None:
    """The file, pipe or folder of this name."""
    path = Path(source)
    try:
        return path if source and path.exists() else None
    except (OSError, ValueError):  # too long for a file name, or with a null byte
        return None


def check_target(path: Path | None, force: bool = False, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse an output file that cannot be written, before the work starts.

    `inputs` are what the command reads (`-`: standard input; a folder: the files in it). They are never replaced.
    """
    if path is None:
        return
    target = target_of(path)
    if not os.access(target.parent, os.W_OK):
        raise FileError(f"the folder {target.parent} is not writable", path, advice="name a file in another folder")
    if not target.exists():
        return
    for source in inputs:
        if source is not None and _reads(source, target):
            raise FileError(f"is read by this command, as {source}", path, advice="name another file to save to")
    if not force:
        raise FileError("exists already", path, advice="add --force to replace it, or name another file")


def checkpoint_path(target: Path) -> Path:
    """Where the checkpoint of an unfinished read is kept."""
    return target.with_name(f"{target.name}.partial")


def same_file(one: Path | None, other: Path | None) -> bool:
    """Whether two paths lead to the same existing file, through links as well."""
    return bool(one and other and one.exists() and other.exists() and one.samefile(other))


def _reads(source: str | Path, target: Path) -> bool:
    if source == "-":
        try:
            return os.path.samestat(os.fstat(sys.stdin.fileno()), target.stat())
        except (OSError, ValueError):  # standard input is not a file
            return False
    path = Path(os.path.expanduser(source))
    files = path.iterdir() if path.is_dir() else [path]
    return any(same_file(file, target) for file in files)


def save_state(state: MultiState, path: Path, notes: dict[str, Any] | None = None) -> None:
    """Save a state. If that fails, as on a full disk, save it elsewhere and raise an error that says where."""
    try:
        state.save(path, notes)
    except (OSError, UsageError) as error:
        reason = error.problem if isinstance(error, FileError) else getattr(error, "strerror", None) or str(error)
        for other in _other_places(path.name):
            try:
                state.save(other, notes)
            except (OSError, UsageError):
                continue
            raise FileError(
                f"{reason}", path, advice=f"the state is saved as {other} instead, move it from there"
            ) from error
        raise FileError(reason, path) from error


def _other_places(name: str) -> Iterator[Path]:
    """Files that do not exist yet: in the user's state folder, and in the folder for temporary files."""
    for folder in (user_state_folder, lambda: Path(tempfile.gettempdir())):
        try:
            parent = folder()
            make_private_folder(parent)
        except (OSError, RuntimeError):  # no home folder, or not writable
            continue
        numbered = (parent / (f"{name}.{n}" if n else name) for n in range(1000))
        yield next(path for path in numbered if not path.exists())


def user_state_folder() -> Path:
    """Where the command line keeps files of the user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "msrnn"
