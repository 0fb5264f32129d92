"""The segments of a state's archives as files of their own, so that a longer archive is not written again.

Segments are written first, then the state file that names them, then those that it no longer names are removed. So a
state file that is there has its segments, at whatever moment a process is killed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from msrnn.core.archive import Archive, ArchivePart, check_finite
from msrnn.core.atomic import make_private_folder, sync_folder
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.segment_folder import (
    SEGMENTS,
    SUFFIX,
    SegmentFile,
    find_folder,
    link_segment,
    list_named,
    list_segments,
    new_path,
    remove_segments,
)
from msrnn.core.state_file import load_description, load_tensors, save_tensors
from msrnn.errors import FileError, UsageError
from msrnn.recall import SEGMENT

RecallLayers = Sequence[tuple[int, RecallSlots]]  # with their indices in the model
FIRST = "first"  # in the description of a segment: the position of its first token
_ADVICE = "use a copy of the file and its folder, or create it again"
_log = logging.getLogger(__name__)


def save_apart(path: Path, tensors: dict[str, Tensor], description: dict[str, Any], layers: RecallLayers) -> None:
    """Write a state file without the whole segments of its archives, and those that are new to files of their own."""

    def write_others() -> dict[str, Any]:
        named = [_write_segments(find_folder(path), layers, number) for number in range(layers[0][1].batch_size)]
        return {SEGMENTS: named} if any(named) else {}

    if path.suffix != SUFFIX:  # another file may have the folder of its name
        raise FileError(f"a state whose segments are apart needs a name that ends in {SUFFIX}", path)
    try:
        save_tensors(path, tensors, description, write_others)
    finally:
        _remove_unnamed(path)


def save_whole(path: Path, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write a state file with all of its archives; segments that a file of its name had apart are removed."""
    save_tensors(path, tensors, description)
    if path.suffix == SUFFIX and list_segments(path):
        _remove_unnamed(path)


def _remove_unnamed(path: Path) -> None:
    """Remove the segments that a state file does not name, once it is on the disk; a failed write has left some too."""
    try:
        sync_folder(path.parent)
        found = list_segments(path)
        files = list_named(path, load_description(path)) if path.exists() else []
        remove_segments(path, found.keys() - {file.path.name for one in files for file in one})
    except (OSError, UsageError) as error:
        _log.warning("%s: segments that it does not name stay: %s", path, error)


def _write_segments(folder: Path, layers: RecallLayers, number: int) -> list[tuple[str, int]]:
    """Let a folder have the whole segments of a sequence -> their names and bytes."""
    archives = {index: layer.archives[number] for index, layer in layers}
    columns = [*zip(*(archive.whole_segments() for archive in archives.values()), strict=True)]
    if not columns:
        return []
    make_private_folder(folder)
    named = []
    for place, segments in enumerate(columns):
        known = {segment.file for segment in segments}
        file = known.pop() if len(known) == 1 else None
        file = file and link_segment(file, folder)
        file = file or _write_segment(folder, archives, place)
        for segment in segments:
            segment.file = file
        named.append((file.path.name, file.nbytes))
    sync_folder(folder)
    return named


def _write_segment(folder: Path, archives: dict[int, Archive], place: int) -> SegmentFile:
    first = next(iter(archives.values())).begin + place * SEGMENT
    tensors = {
        f"{index}.{name}": tensor
        for index, archive in archives.items()
        for name, tensor in archive.tensors(slice(place, place + 1)).items()
    }
    path = new_path(folder, first)
    save_tensors(path, tensors, {FIRST: first})
    return SegmentFile(path, path.stat().st_size)


def load_segments(
    files: Sequence[Sequence[SegmentFile]], layers: RecallLayers, begins: Sequence[int]
) -> list[dict[int, list[ArchivePart]]]:
    """The whole segments of each sequence's archives, from position `begins` on: the parts of each layer.

    A file that sequences share is read once.
    """
    load = cache(partial(_load_parts, layers))
    loaded = [
        [load(file, begin + place * SEGMENT) for place, file in enumerate(own)]
        for own, begin in zip(files, begins, strict=True)
    ]
    return [{index: [parts[index] for parts in own] for index, _ in layers} for own in loaded]


def _load_parts(layers: RecallLayers, file: SegmentFile, first: int) -> dict[int, ArchivePart]:
    """The part of each layer in the file of a segment, whose first token has position `first`."""
    tensors = _load_segment(file, first)
    if tensors.keys() != {f"{index}.{name}" for index, layer in layers for name in layer.archived_names}:
        raise FileError(f"has other tensors than {len(layers)} layers archive", file.path, advice=_ADVICE)
    return {
        index: ArchivePart({name: tensors[f"{index}.{name}"] for name in layer.archived_names}, file)
        for index, layer in layers
    }


def _load_segment(file: SegmentFile, first: int) -> dict[str, Tensor]:
    if not file.is_whole():
        found = f"has {file.path.stat().st_size:,} bytes, not {file.nbytes:,}" if file.path.exists() else "is missing"
        raise FileError(f"a segment of an archive {found}", file.path, advice=_ADVICE)
    tensors, description = load_tensors(file.path)
    if description.get(FIRST) != first or any(tensor.shape[1:2] != (SEGMENT,) for tensor in tensors.values()):
        raise FileError(f"not the archived rows of {SEGMENT:,} tokens from {first:,} on", file.path, advice=_ADVICE)
    try:
        check_finite(tensors)
    except UsageError as error:
        raise FileError(str(error), file.path, advice=_ADVICE) from error
    return tensors
