"""What a model remembers, as a value that a user can hold: save, load, fork, select."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrnn.core.device_memory import check_fits
from msrnn.core.slots import Memory
from msrnn.core.state_file import load_tensors, save_tensors
from msrnn.core.validation import check_counts, check_layers, clear_free, is_incomplete
from msrnn.errors import UsageError

LATER = ("rotary", "windows")  # what a fingerprint did not always tell: states without it fit


@dataclass(eq=False)
class MultiState:
    """The state of a whole model: one memory per layer, at the model's own layer indices."""

    layers: list[Any]
    fingerprint: dict[str, Any]
    whole: bool = True  # no forward pass was interrupted half-way

    def _own(self) -> Iterator[tuple[int, Memory]]:
        return ((i, layer) for i, layer in enumerate(self.layers) if isinstance(layer, Memory))

    @property
    def batch_size(self) -> int:
        return next(layer for _, layer in self._own()).batch_size

    @property
    def seen(self) -> Tensor:
        """Tokens read so far, per row: [B], a copy. Padding never counts."""
        return next(layer for _, layer in self._own()).seen.clone()

    @property
    def columns(self) -> int:
        """Columns read so far, padding included."""
        return next(layer for _, layer in self._own()).columns

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def reset(self) -> None:
        """Forget everything; the buffers stay where they are."""
        for layer in self.layers:
            layer.reset()
        self.whole = True

    def count(self, columns: int) -> None:
        """Count columns that a captured graph reads: its replay runs no Python."""
        for _, layer in self._own():
            layer.count(columns)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While a forward pass goes through the layers: if it does not come to its end, neither does the state."""
        self.whole = False
        yield
        self.whole = True

    def positions(self, layer: int) -> Tensor:
        """Positions of the tokens that a layer holds, [B, G, size + 1], -1 where a slot is empty; a copy."""
        own = dict(self._own())
        if layer not in own:
            raise UsageError(f"layer={layer!r}: states are held by layers {sorted(own)}")
        return own[layer].position.clone()

    def check_fits(self, fingerprint: dict[str, Any]) -> None:
        """Whether this is a state of the model, policy, size and dtype that `fingerprint` tells of."""
        _compare("a state", self.fingerprint, fingerprint)
        self.check_whole()

    def check_whole(self) -> None:
        """A forward pass that was interrupted leaves layers that have read more than others, or half of a layer."""
        if not self.whole or len({layer.columns for _, layer in self._own()}) > 1:
            raise UsageError("this state was interrupted half-way through a read: go on from a saved or forked one")

    def select(self, rows: Sequence[int] | Tensor) -> MultiState:
        """A new state with these rows of the batch; the old one is untouched."""
        index = self.rows(rows)
        self._check_memory(len(index))
        return MultiState([layer.select(index) for layer in self.layers], self.fingerprint, self.whole)

    def rows(self, numbers: Sequence[int] | Tensor) -> Tensor:
        """Row numbers as an index [N], refused where this state has no such rows."""
        index = torch.as_tensor(numbers)
        if index.ndim != 1 or index.numel() == 0 or index.is_floating_point() or index.dtype == torch.bool:
            raise UsageError(f"rows={numbers!r}: must be a non-empty list of row numbers")
        if int(index.min()) < 0 or int(index.max()) >= self.batch_size:
            raise UsageError(f"rows={index.tolist()}: this state has rows 0 to {self.batch_size - 1}")
        return index

    def part(self, rows: slice) -> MultiState:
        """These rows of the batch as a state of their own, on the same buffers."""
        return MultiState([layer.part(rows) for layer in self.layers], self.fingerprint)

    def fork(self, copies: int) -> MultiState:
        """A new state with every row `copies` times, copies of a row side by side; the old one is untouched."""
        if not isinstance(copies, int) or isinstance(copies, bool) or copies < 1:
            raise UsageError(f"fork({copies!r}): must be a whole number of copies, 1 or more")
        self._check_memory(self.batch_size * copies)
        return self.select(each(self.batch_size, copies))

    def _check_memory(self, rows: int) -> None:
        one = self.nbytes // self.batch_size
        device = next(layer for _, layer in self._own()).seen.device
        check_fits(one * rows, device, f"a state of {rows:,} rows", lambda free: f"{free // one:,} rows fit")

    def become(self, other: MultiState, rows: Tensor) -> None:
        """What `other.select(rows)` would be, in the buffers that are here already."""
        self.whole = other.whole
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.columns = theirs.columns
            for name, buffer in mine.tensors().items():
                buffer.copy_(getattr(theirs, name)[rows.to(buffer.device)])

    def save(self, path: str | os.PathLike[str], notes: dict[str, Any] | None = None) -> None:
        """Write the state to one safetensors file, whole or not at all; `notes` are kept in its description.

        What could not be loaded again is refused: numbers that are not finite, as a model that overflows computes them.
        """
        self.check_whole()
        layers = self._savable()
        incomplete = is_incomplete(layers)
        try:
            check_layers(layers, incomplete)
        except ValueError as error:
            raise UsageError(f"{path}: not saved, {error}; save the other rows of the batch with select()") from error
        description = {
            **self.fingerprint,
            "batch_size": self.batch_size,
            "columns": [layer.columns for _, layer in layers],
            "model_dtype": "/".join(sorted({str(layer.dtype).removeprefix("torch.") for _, layer in layers})),
            "notes": notes or {},
        }
        tensors = {f"{i}.{name}": tensor for i, layer in layers for name, tensor in layer.tensors().items()}
        save_tensors(Path(path), tensors, {**description, "incomplete": True} if incomplete else description)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], fingerprint: dict[str, Any], empty: Callable[[int], MultiState]
    ) -> MultiState:
        """Read a state that was saved under this very fingerprint; `empty` makes one of a given batch size.

        Everything that kernels take for granted is checked, so that no file can make one write out of its bounds.
        """
        tensors, found = load_tensors(Path(path))
        _compare(f"{path}: saved", found, fingerprint)
        state = empty(1)  # the file's batch size is not trusted until its tensors agree
        try:
            state._restore(tensors, found)
        except ValueError as error:
            raise UsageError(f"{path}: not a state to go on from, {error}; take a copy, or make it again") from error
        return state

    def _restore(self, tensors: dict[str, Tensor], found: dict[str, Any]) -> None:
        layers = self._savable()
        batch_size, columns = check_counts(found, len(layers))
        expected = {f"{i}.{name}" for i, layer in layers for name in layer.tensors()}
        if expected != tensors.keys():
            odd = sorted(expected ^ tensors.keys())
            raise UsageError(f"tensor {odd[0]} {'is missing' if odd[0] in expected else 'belongs to no layer'}")
        for i, layer in layers:
            layer.restore({name: tensors[f"{i}.{name}"] for name in layer.tensors()}, columns, batch_size)
        check_layers(layers, incomplete=found.get("incomplete") is True)
        for _, layer in layers:
            clear_free(layer)

    def _savable(self) -> list[tuple[int, Memory]]:
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, Memory):
                raise UsageError(f"layer {index} keeps a linear-attention state of its own, which cannot be saved")
        return list(self._own())


def each(rows: int, copies: int) -> Tensor:
    """Every row's number so many times, copies side by side."""
    return torch.arange(rows).repeat_interleave(copies)


def _compare(what: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if found.get(name, value if name in LATER else None) != value:
            raise UsageError(f"{what} with {name} {found.get(name)!r} does not fit a model with {name} {value!r}")
