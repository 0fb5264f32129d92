"""What the buffers of bounded and unbounded layers have in common: tensors whose first dimension is the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msrnn.core.shards import Shards, own_part
from msrnn.core.weight_network import WeightNetwork
from msrnn.errors import UsageError


@dataclass(frozen=True)
class LayerShape:
    """Heads, dimensions, dtype and device of a layer's KV rows."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    state_dtype: torch.dtype | None = None  # 8-bit codes, where rows are quantized; None: rows are kept in `dtype`
    shards: Shards | None = None  # the processes that have the layer's other heads; `heads` are those of this one
    reach: int = 0  # the distance of recalled rows, where keys are re-rotated
    archived: int | None = None  # the largest number of tokens that are archived; None: all
    paged: bool = False  # whether kernels read and write the archive
    layer: int = 0  # its index in the model
    network: WeightNetwork | None = None  # learned row weights, where the policy has a file of them


HELD = 2**31 - 1  # the eviction time of a KV row that is still held
EMPTY = {"position": -1, "key_scale": 1, "value_scale": 1}  # what an empty layer's buffers hold; others 0
MOST_COLUMNS = 2**31 - 2**20  # positions are int32, below HELD

# Tensors made in inference mode cannot be changed outside of it, and a state outlives the mode it was made in.
ordinary_tensors = torch.inference_mode(False)


class Buffers:
    """Tensors whose first dimension is the batch: KV rows and their positions."""

    @ordinary_tensors
    def __init__(self, batch_size: int, shape: LayerShape, rows: int, groups: int) -> None:
        B, K, device = batch_size, shape.kv_heads, shape.device
        self.dtype = shape.dtype  # the dtype that the model computes in
        self.shards = shape.shards
        self.keys = torch.zeros(B, K, rows, shape.key_dim, dtype=shape.state_dtype or shape.dtype, device=device)
        self.values = torch.zeros(B, K, rows, shape.value_dim, dtype=shape.state_dtype or shape.dtype, device=device)
        self.position = torch.full((B, groups, rows), -1, dtype=torch.int32, device=device)
        self.seen = torch.zeros(B, dtype=torch.int64, device=device)  # tokens read

    def reset(self) -> None:
        """Make the layer empty, in place: the buffers then equal those of a new layer."""
        for name, tensor in self.tensors().items():
            tensor.fill_(EMPTY.get(name, 0))

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def saved_tensors(self) -> dict[str, Tensor]:
        """Those that a file holds."""
        return self.tensors()

    @property
    def batch_size(self) -> int:
        return int(self.seen.shape[0])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    @property
    def kind(self) -> Any:
        """What layers must have in common to be joined, besides the fingerprint of their states."""
        return type(self)

    def archive_nbytes(self, seen: Sequence[int]) -> int:
        """Bytes of the archived rows; `seen` has the tokens that each sequence has read. Forks count shared rows."""
        return 0

    def head_tensors(self) -> set[str]:
        """The tensors whose second dimension is heads, which processes may share."""
        return {"keys", "values"}

    @ordinary_tensors
    def gather_heads(self, archives: bool = True) -> Any:
        """Gather the heads of all processes: the layer, as one process alone would have it.

        Every process must call it. Without `archives`, those of the result are empty, which saves memory.
        """
        other = self._with(lambda tensor: tensor)
        if self.shards is not None:
            for name in sorted(self.head_tensors() & self.tensors().keys()):  # every process in one order
                setattr(other, name, self.shards.gather(getattr(self, name), 1))
            other.shards = None
        return other

    @ordinary_tensors
    def divide(self, like: Any) -> Any:
        """The heads of the process that has `like`, a layer of this kind, of a layer that has all heads."""
        other = self._with(lambda tensor: tensor)
        for name in self.head_tensors() & self.tensors().keys():
            setattr(other, name, own_part(getattr(self, name), 1, like.shards).contiguous())
        other.shards = like.shards
        return other

    def select(self, sequences: Tensor) -> Any:
        """A new layer with these sequences; the old one is untouched."""
        return self._with(lambda tensor: tensor.index_select(0, sequences.to(tensor.device)))

    @ordinary_tensors
    def _with(self, change: Callable[[Tensor], Tensor]) -> Any:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        vars(other).update({name: change(tensor) for name, tensor in self.tensors().items()})
        return other

    def view(self, sequences: slice) -> Any:
        """The same buffers, of these sequences only."""
        return self._with(lambda tensor: tensor[sequences])

    def copy(self, sequences: slice) -> Any:
        """A copy of these sequences."""
        return self._with(lambda tensor: tensor[sequences].clone())

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """A copy on another device."""
        return self._with(lambda tensor: tensor.to(device, copy=True, non_blocking=non_blocking))

    @ordinary_tensors
    def cat(self, layers: Sequence[Any], columns: int) -> Any:
        """The sequences of several layers of this kind, this one's first; `columns` is the most that one has read."""
        other = self._with(lambda tensor: tensor)
        for name in self.tensors():
            setattr(other, name, torch.cat([getattr(layer, name).to(self.seen.device) for layer in layers]))
        return other

    def reserve(self, columns: int) -> None:
        """Make room in the archives, if there are any, for the next columns."""

    def begin_read(self, columns: int) -> None:
        """Make room in the archives, if there are any, for a forward pass, and count its columns."""

    def share_buffers(self) -> Any:
        """A layer with the same buffers. Where rows are archived, it has empty archives of its own."""
        return self._with(lambda tensor: tensor)

    def take_archives(self, numbers: Sequence[int], other: Any, sources: Sequence[int]) -> None:
        """Give some sequences the archives of sequences of another layer of this kind, if there are archives."""

    def clear_archive(self, number: int) -> None:
        """Forget the archived rows of a sequence, where there are any. It then counts as empty."""
        self.seen[number] = 0

    def forget(self, sequences: Tensor) -> None:
        """Make the sequences empty where `sequences` [B] is True, in place. The host does not wait for a device."""
        for name, tensor in self.tensors().items():
            tensor.masked_fill_(sequences.view(-1, *[1] * (tensor.dim() - 1)), EMPTY.get(name, 0))

    def put(self, sequences: Tensor, other: Any) -> None:
        """Overwrite these sequences by those of another layer of this kind: the reverse of `select`."""
        theirs = other.tensors()
        for name, tensor in self.tensors().items():
            tensor.index_copy_(0, sequences, theirs[name])

    def reorder(self, sequences: Tensor) -> None:
        """`select` in place, for beams: no buffer moves, so pointers in captured graphs stay valid."""
        for value in self.tensors().values():
            value.copy_(value.index_select(0, sequences.to(value.device)))

    @ordinary_tensors
    def restore(self, tensors: dict[str, Tensor], columns: int, batch_size: int) -> None:
        """Replace the buffers by copies of saved tensors. Dtypes and shapes must agree, except for the batch size."""
        for name, mine in self.saved_tensors.items():
            saved, shape = tensors[name], self._shape_to_restore(mine, tensors, batch_size)
            if saved.dtype != mine.dtype or list(saved.shape) != shape:
                raise UsageError(f"{name}: {saved.dtype} {list(saved.shape)}, not {mine.dtype} {shape}")
        for name, mine in self.saved_tensors.items():
            # A copy: a loaded tensor may lie in a mapped file, at an address that kernels do not expect.
            setattr(self, name, tensors[name].to(mine.device, copy=True))

    def _shape_to_restore(self, mine: Tensor, tensors: dict[str, Tensor], batch_size: int) -> list[int]:
        return [batch_size, *mine.shape[1:]]

    def advance(self, columns: int, real: Tensor | None) -> Tensor:
        """The positions [B, columns] int32 of the next columns, -1 where padding; counts their tokens."""
        start = self.seen[:, None].to(torch.int32)
        if real is None:
            self.seen += columns
            return start if columns == 1 else start + torch.arange(columns, dtype=torch.int32, device=start.device)
        counted = real.cumsum(-1, dtype=torch.int32)
        self.seen += counted[:, -1]
        return (start + counted - 1).masked_fill(~real, -1)
