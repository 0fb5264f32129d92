"""The buffers of an unbounded layer: rows that grow with the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from msrnn.core.buffers import Buffers, LayerShape, ordinary_tensors


class Growing(Buffers):
    """The unbounded layer: every token is kept, and the buffers double when they are full."""

    def __init__(self, batch_size: int, shape: LayerShape) -> None:
        super().__init__(batch_size, shape, rows=64, groups=1)
        self.padded = False  # whether any column ever was padding: if not, no mask is needed

    def reset(self) -> None:
        super().reset()
        self.padded = False

    @ordinary_tensors
    def cat(self, layers: Sequence[Any], columns: int) -> Any:
        rows = max(layer.keys.shape[2] for layer in layers)
        other = super().cat([layer._grow(rows) for layer in layers], columns)
        other.padded = bool((other.seen != columns).any())
        return other

    def _grow(self, rows: int) -> Any:
        """A copy of the layer with this many rows, or as many as it has."""
        more = max(0, rows - self.keys.shape[2])
        other = self._with(lambda tensor: tensor)
        other.keys, other.values = (pad(tensor, (0, 0, 0, more)) for tensor in (self.keys, self.values))
        other.position = pad(self.position, (0, more), value=-1)
        return other

    def restore(self, tensors: dict[str, Tensor], columns: int, batch_size: int) -> None:
        super().restore(tensors, columns, batch_size)
        self.padded = bool((self.seen != columns).any())

    def _shape_to_restore(self, mine: Tensor, tensors: dict[str, Tensor], batch_size: int) -> list[int]:
        """As many rows as were saved, the same number of keys, values and positions."""
        rows = list(tensors["position"].shape[2:3])
        return [batch_size, *mine.shape[1:2], *rows, *mine.shape[3:]] if mine.ndim > 1 else [batch_size]

    @ordinary_tensors
    def append(self, start: int, key: Tensor, value: Tensor, position: Tensor) -> None:
        """Write key, value [B, K, T, D] and position [B, T] from `start` on, the number of columns read before."""
        stop = start + key.shape[2]
        capacity = self.keys.shape[2]
        if stop > capacity:
            grown = self._grow(max(2 * capacity, stop))
            self.keys, self.values, self.position = grown.keys, grown.values, grown.position
        self.keys[:, :, start:stop] = key
        self.values[:, :, start:stop] = value
        self.position[:, 0, start:stop] = position
