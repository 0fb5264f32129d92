"""The layers of a state as the tensors and the description of one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrnn.core.protection import no_ranges
from msrnn.core.slots import Memory, Slots
from msrnn.core.state_file import save_tensors
from msrnn.core.validation import check_counts, check_layers, check_savable, clear_free, is_incomplete
from msrnn.errors import FileError, UsageError

PROTECTED = "protected"  # the tensor of protected ranges, which all layers share; absent if there are none
Layers = Sequence[tuple[int, Memory]]  # with their indices in the model


def save_layers(path: Path, layers: Layers, columns: int, fingerprint: dict[str, Any], notes: dict[str, Any]) -> None:
    """Write layers to a file, completely or not at all; `columns` is the number of columns that they have read."""
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
    save_tensors(path, _fold(layers), {**description, "incomplete": True} if incomplete else description)


def restore_layers(layers: Layers, tensors: dict[str, Tensor], description: dict[str, Any]) -> int:
    """Fill layers with a file's tensors, checked -> the columns that they have read."""
    batch_size, columns = check_counts(description, len(layers))
    tensors = _unfold(layers, tensors, batch_size)
    expected = {f"{i}.{name}" for i, layer in layers for name in layer.tensors()}
    if expected != tensors.keys():
        mismatched = sorted(expected ^ tensors.keys())
        problem = "is missing" if mismatched[0] in expected else "belongs to no layer"
        raise UsageError(f"tensor {mismatched[0]} {problem}")
    for i, layer in layers:
        layer.restore({name: tensors[f"{i}.{name}"] for name in layer.tensors()}, columns, batch_size)
    check_layers(layers, columns, incomplete=description.get("incomplete") is True)
    for _, layer in layers:
        clear_free(layer)
    return columns


def _fold(layers: Layers) -> dict[str, Tensor]:
    tensors = {f"{i}.{name}": tensor for i, layer in layers for name, tensor in layer.tensors().items()}
    ranges = [tensors.pop(f"{i}.{PROTECTED}") for i, layer in layers if isinstance(layer, Slots)]
    return {**tensors, PROTECTED: ranges[0]} if ranges and bool(ranges[0].any()) else tensors


def _unfold(layers: Layers, tensors: dict[str, Tensor], batch_size: int) -> dict[str, Tensor]:
    bounded = [i for i, layer in layers if isinstance(layer, Slots)]
    if not bounded:
        return tensors
    # Not allocated: the file's batch size is not trusted until its tensors agree.
    ranges = tensors.get(PROTECTED, no_ranges(1, torch.device("cpu")).expand(batch_size, -1, -1))
    rest = {name: tensor for name, tensor in tensors.items() if name != PROTECTED}
    return {**rest, **{f"{i}.{PROTECTED}": ranges for i in bounded}}
