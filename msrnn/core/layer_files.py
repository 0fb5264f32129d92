"""The layers of a state as the tensors and the description of a file, and maybe of its archives' segments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrnn.checks import is_whole
from msrnn.core.archive import ArchivePart
from msrnn.core.own_sizes import join_fewer, no_fewer, split_sizes
from msrnn.core.protection import no_ranges
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.segment_files import RecallLayers, load_segments, save_apart, save_whole
from msrnn.core.segment_folder import SEGMENTS, list_named
from msrnn.core.slots import Memory, Slots
from msrnn.core.state_file import save_tensors
from msrnn.core.validation import check_counts, check_layers, check_savable, clear_free, is_incomplete
from msrnn.errors import FileError, UsageError

FEWER = "fewer"
PROTECTED = "protected"  # the tensor of protected ranges, which all layers share; absent if there are none
OWN_SIZES = "own_sizes"  # the sizes of sequences with one of their own, 0: that of the layers; absent if all have that
ARCHIVED = "archived"  # the first archived position of each sequence, in the description of layers with an archive
Layers = Sequence[tuple[int, Memory]]  # with their indices in the model


def save_layers(
    path: Path, layers: Layers, columns: int, fingerprint: dict[str, Any], notes: dict[str, Any], apart: bool = False
) -> None:
    """Write layers to a file, completely or not at all; `columns` is the number of columns that they have read.

    `apart`: whole segments of archives are in files of their own, and those that are there already are not written.
    """
    check_savable(layers)
    incomplete = is_incomplete(layers)
    try:
        check_layers(layers, columns, incomplete)
    except ValueError as error:
        raise FileError(
            f"not saved, {error}", path, advice="save the other sequences of the batch with select()"
        ) from error
    description = {
        **fingerprint,
        "batch_size": layers[0][1].batch_size,
        "columns": [columns] * len(layers),
        "model_dtype": "/".join(sorted({str(layer.dtype).removeprefix("torch.") for _, layer in layers})),
        "notes": notes,
    }
    if incomplete:
        description["incomplete"] = True
    recalling = _find_recalling(layers)
    if not recalling:
        save_tensors(path, _fold(layers), description)
        return
    description[ARCHIVED] = [archive.begin for archive in recalling[0][1].archives]
    tensors = {**_fold(layers), **_fold_archives(recalling, apart)}
    if apart:
        save_apart(path, tensors, description, recalling)
    else:
        save_whole(path, tensors, description)


def restore_layers(layers: Layers, tensors: dict[str, Tensor], description: dict[str, Any], path: Path) -> int:
    """Fill layers with the tensors of the file at `path`, checked -> the columns that they have read."""
    batch_size, columns = check_counts(description, len(layers))
    tensors = _unfold(layers, dict(tensors), batch_size)
    archives = _take_archives(_find_recalling(layers), tensors, description, batch_size, path)
    expected = {f"{i}.{name}" for i, layer in layers for name in layer.saved_tensors}
    if expected != tensors.keys():
        mismatched = sorted(expected ^ tensors.keys())
        problem = "is missing" if mismatched[0] in expected else "belongs to no layer"
        raise UsageError(f"tensor {mismatched[0]} {problem}")
    for i, layer in layers:
        layer.restore({name: tensors[f"{i}.{name}"] for name in layer.saved_tensors}, columns, batch_size)
    for layer, parts, begins in archives:
        layer.restore_archives(parts, begins)
    check_layers(layers, columns, incomplete=description.get("incomplete") is True)
    for _, layer in layers:
        clear_free(layer)
    return columns


def _fold(layers: Layers) -> dict[str, Tensor]:
    tensors = {f"{i}.{name}": tensor for i, layer in layers for name, tensor in layer.saved_tensors.items()}
    bounded = [(i, layer) for i, layer in layers if isinstance(layer, Slots)]
    ranges, fewer = ([tensors.pop(f"{i}.{name}") for i, _ in bounded] for name in (PROTECTED, FEWER))
    if ranges and bool(ranges[0].any()):
        tensors[PROTECTED] = ranges[0]
    sizes = join_fewer([layer.bound for _, layer in bounded], fewer)
    return tensors if sizes is None else {**tensors, OWN_SIZES: sizes}


def _find_recalling(layers: Layers) -> RecallLayers:
    return [(i, layer) for i, layer in layers if isinstance(layer, RecallSlots)]


def _fold_archives(layers: RecallLayers, apart: bool) -> dict[str, Tensor]:
    for _, layer in layers:
        layer.settle()
    return {
        f"{i}.archive.{b}.{name}": tensor
        for i, layer in layers
        for b, archive in enumerate(layer.archives)
        for name, tensor in archive.tensors(slice(len(archive.whole_segments()) if apart else 0, None)).items()
    }


def _take_archives(
    layers: RecallLayers, tensors: dict[str, Tensor], description: dict[str, Any], batch_size: int, path: Path
) -> list[tuple[RecallSlots, list[list[ArchivePart]], list[int]]]:
    """Take the archives of each layer out of a file's tensors, with the first position of each."""
    if not layers:
        return []
    begins, files = description.get(ARCHIVED), list_named(path, description) or [[]] * batch_size
    if not isinstance(begins, list) or len(begins) != batch_size or not all(map(is_whole, begins)):
        raise UsageError(f"{ARCHIVED} {begins!r:.40}: must be a list of {batch_size} positions")
    if len(files) != batch_size:
        raise UsageError(f"{SEGMENTS} of {len(files)} sequences, and there are {batch_size}")
    whole = load_segments(files, layers, begins)
    taken = []
    for i, layer in layers:
        names = layer.archived_names
        rest = [{name: _take(tensors, f"{i}.archive.{b}.{name}") for name in names} for b in range(batch_size)]
        taken.append((layer, [[*whole[b][i], ArchivePart(rows)] for b, rows in enumerate(rest)], begins))
    return taken


def _take(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise UsageError(f"tensor {name} is missing")
    return tensors.pop(name)


def _unfold(layers: Layers, tensors: dict[str, Tensor], batch_size: int) -> dict[str, Tensor]:
    bounded = {i: layer for i, layer in layers if isinstance(layer, Slots)}
    if not bounded:
        return tensors
    # Not allocated: the file's batch size is not trusted until its tensors agree.
    ranges = tensors.get(PROTECTED, no_ranges(1, torch.device("cpu")).expand(batch_size, -1, -1))
    fewer = _unfold_sizes(layers, tensors.get(OWN_SIZES), batch_size)
    shared = {PROTECTED, OWN_SIZES} & tensors.keys()
    rest = {_rename(name): tensor for name, tensor in tensors.items() if name not in shared}
    if len(rest) < len(tensors) - len(shared):
        raise UsageError("a layer has both norms and weights of its rows")
    return {**rest, **{f"{i}.{PROTECTED}": ranges for i in bounded}, **{f"{i}.{FEWER}": fewer[i] for i in bounded}}


def _unfold_sizes(layers: Layers, sizes: Tensor | None, batch_size: int) -> dict[int, Tensor]:
    if sizes is None:
        return {i: no_fewer(1, torch.device("cpu")).expand(batch_size, -1) for i, _ in layers}
    if sizes.dtype != torch.int32 or list(sizes.shape) != [batch_size]:
        raise UsageError(f"{OWN_SIZES}: {sizes.dtype} {list(sizes.shape)}, not torch.int32 {[batch_size]}")
    bounds = [layer.bound if isinstance(layer, Slots) else None for _, layer in layers]
    return dict(zip((i for i, _ in layers), split_sizes(bounds, sizes), strict=True))


def _rename(name: str) -> str:
    """The name of a tensor; older files have the weight of a row as its norm."""
    return f"{name.removesuffix('norm')}row_weight" if name.endswith(".norm") else name
