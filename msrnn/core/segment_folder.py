"""The folder of a state's segment files: NAME.archive, next to NAME.safetensors.

A whole segment of an archive never changes, and neither does its file. The state file names the segments that belong to
it; until it does, or when it no longer does, they count for nothing and may be removed. States of one folder that share
a segment have a hard link to it each: the bytes are free when the last one is deleted. This module does not load torch.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from msrnn.core.atomic import remove_unfinished, sync_folder
from msrnn.errors import FileError

SEGMENTS = "segments"  # in a description: the name and the bytes of each whole segment, by sequence
SUFFIX, FOLDER_SUFFIX = ".safetensors", ".archive"
_NAME = re.compile(r"\d{10}-[0-9a-f]{32}\.safetensors")


class SegmentFile(NamedTuple):
    """A file with the rows of one whole segment in all layers."""

    path: Path
    nbytes: int

    def is_whole(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.nbytes


def find_folder(path: Path) -> Path:
    """Where the segments of a state file are."""
    return path.with_name(path.name.removesuffix(SUFFIX) + FOLDER_SUFFIX)


def new_path(folder: Path, first: int) -> Path:
    """A new file for the segment that begins at position `first`; no other file ever has this name."""
    return folder / f"{first:010}-{uuid.uuid4().hex}{SUFFIX}"


def list_named(path: Path, description: dict[str, Any]) -> list[list[SegmentFile]]:
    """The segments that a state file names, by sequence; none, if its archive is in the file itself. Not trusted.

    Sequences may share a segment; one sequence has it once.
    """
    found = description.get(SEGMENTS, [])
    if not isinstance(found, list) or not all(isinstance(one, list) for one in found):
        raise FileError(f"{SEGMENTS} {found!r:.40}: must be a list for each sequence", path)
    for one in found:
        seen = set[str]()
        for entry in one:
            match entry:
                case [str(name), int(size)] if _NAME.fullmatch(name) and name not in seen and type(size) is int:
                    seen.add(name)
                case _:
                    raise FileError(f"{SEGMENTS} {entry!r:.80}: must be the name and the bytes of a segment", path)
    return [[SegmentFile(find_folder(path) / name, size) for name, size in one] for one in found]


def list_segments(path: Path) -> dict[str, int]:
    """The segment files in the folder of a state file, whether it names them or not, and their bytes."""
    found = {}
    for file in find_folder(path).glob(f"*{SUFFIX}"):
        if _NAME.fullmatch(file.name):
            try:
                found[file.name] = file.stat().st_size
            except FileNotFoundError:  # it was deleted meanwhile
                continue
    return found


def remove_segments(path: Path, names: Iterable[str]) -> None:
    """Remove segments from the folder of a state file, which does not name them, and the folder if it is empty then."""
    folder = find_folder(path)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir():
        remove_unfinished(folder, lambda name: _NAME.fullmatch(name) is not None)
        if not any(folder.iterdir()):
            folder.rmdir()


def link_segment(file: SegmentFile, folder: Path) -> SegmentFile | None:
    """Share a segment file with another folder next to its own; None: it must be written there.

    It may have been deleted since it was written, and a file system may have no links. Folders of other owners are not
    next to its own: nothing is shared with them.
    """
    target = SegmentFile(folder / file.path.name, file.nbytes)
    if target.is_whole():
        return target
    others = folder.parent.glob(f"*{FOLDER_SUFFIX}/{file.path.name}")
    for source in chain([file.path], others) if file.path.parent.parent == folder.parent else ():
        try:
            os.link(source, target.path)
        except OSError:
            continue
        if target.is_whole():
            return target
        target.path.unlink()
    return None


def link_segments(path: Path, other: Path) -> None:
    """Let another state file have all segments of this one as well."""
    if names := list_segments(path):
        folder = find_folder(other)
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            os.link(find_folder(path) / name, folder / name)
        sync_folder(folder)


def move_folder(path: Path, ending: str) -> None:
    """Add an ending to the name of a state file's folder, if there is one; it replaces a folder of that name."""
    folder = find_folder(path)
    if folder.is_dir():
        target = folder.with_name(folder.name + ending)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)


def list_names(folder: Path) -> list[str]:
    """The names of the states in a folder that have segments, or had some."""
    return [path.name.removesuffix(FOLDER_SUFFIX) for path in folder.glob(f"*{FOLDER_SUFFIX}") if path.is_dir()]
