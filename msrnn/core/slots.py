"""The buffers of one layer: a fixed number of slots, or rows that grow.

This module does not know attention: a backend decides which token is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from msrnn.core.protection import RANGES, no_ranges
from msrnn.core.quantization import SCALE_DTYPE, Rows, quantize
from msrnn.core.shards import Shards, own_part
from msrnn.errors import UsageError
from msrnn.policy import Bound


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
    reach: int = 0  # the farthest distance of a recalled row, where keys are re-rotated
    archived: int | None = None  # the largest number of tokens that are archived; None: all
    paged: bool = False  # whether kernels read and write the archive


HELD = 2**31 - 1  # the eviction time of a KV row that is still held
MOST_COLUMNS = 2**31 - 2**20  # positions are int32, below HELD

# Tensors made in inference mode cannot be changed outside of it, and a state outlives the mode it was made in.
ordinary_tensors = torch.inference_mode(False)


class _Buffers:
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
        for tensor in self.tensors().values():
            tensor.zero_()
        self.position.fill_(-1)

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


class Slots(_Buffers):
    """The fixed buffers of a bounded layer. Keys are rotated when written, so the order of slots means nothing."""

    @ordinary_tensors
    def __init__(self, batch_size: int, shape: LayerShape, bound: Bound) -> None:
        super().__init__(batch_size, shape, bound.slots, bound.groups(shape.kv_heads))
        self.bound = bound
        self.state_dtype = shape.state_dtype
        self.protected = no_ranges(batch_size, shape.device)  # [B, RANGES, 2] int32: positions that are not evicted
        remembers = bool(bound.policy.decay)  # otherwise only the newest query, or the position, decides
        zeros = partial(torch.zeros, self.position.shape, dtype=torch.float32, device=shape.device)
        self.importance = zeros() if remembers else None
        # of each row's value in all heads of a group
        self.norm = zeros() if bound.policy.value_norm else None
        rows = self.keys.shape[:3]
        self.key_scale, self.value_scale = (
            torch.ones(rows, dtype=SCALE_DTYPE, device=shape.device) if shape.state_dtype else None for _ in range(2)
        )

    def head_tensors(self) -> set[str]:
        names = super().head_tensors() | {"key_scale", "value_scale"}
        return names | {"position", "importance", "norm"} if self.bound.policy.per == "head" else names

    @property
    def ranges(self) -> Tensor | None:
        """The protected ranges that a backend spares [B, RANGES, 2]; None where the layer's window does not."""
        return self.protected if self.bound.protects else None

    @property
    def joint(self) -> Shards | None:
        """The processes that decide together what is evicted, where one group has the heads of all of them."""
        policy = self.bound.policy
        observes = policy.decay is not None or policy.value_norm
        return self.shards if policy.per == "layer" and observes else None

    @staticmethod
    def nbytes_of(batch_size: int, shape: LayerShape, bound: Bound) -> int:
        """The value that `nbytes` will have, computed without an allocation."""
        policy, itemsize = bound.policy, (shape.state_dtype or shape.dtype).itemsize
        row = shape.kv_heads * (shape.key_dim + shape.value_dim) * itemsize
        if shape.state_dtype:
            row += 2 * shape.kv_heads * SCALE_DTYPE.itemsize
        numbers = 1 + bool(policy.decay) + policy.value_norm  # position, importance, norm: 4 bytes each
        row += bound.groups(shape.kv_heads) * numbers * 4
        return batch_size * (bound.slots * row + 8 + RANGES * 2 * 4)

    def reset(self) -> None:
        super().reset()
        for scales in (self.key_scale, self.value_scale):
            if scales is not None:
                scales.fill_(1)

    def in_use(self, more: int) -> Slots:
        """A view of the slots up to the last held one, with room for `more` tokens.

        Tokens go into the first free slots, so the tokens of a state that is not full yet are in its first slots.
        """
        holds = (self.position >= 0).flatten(0, 1)
        if bool(holds.all(-1).any()):
            raise UsageError("this state has no free slot: read the text again, or load another state")
        held = holds.any(0).nonzero()
        count = (int(held[-1]) + 1 if len(held) else 0) + more + 1  # one slot always stays free
        if count >= self.position.shape[2]:
            return self
        slots: Slots = self._with(
            lambda tensor: tensor if tensor is self.seen or tensor is self.protected else tensor[:, :, :count]
        )
        return slots

    def quantize(self, key: Tensor, value: Tensor) -> tuple[Rows, Rows]:
        """New rows as these slots keep them: quantized if there is a `state_dtype`."""
        return quantize(key, self.state_dtype), quantize(value, self.state_dtype)

    def norms(self, value: Rows) -> Tensor | None:
        """The norms [B, G, C] float32 of new values [B, K, C, D]; None where the policy does not use them."""
        if self.norm is None:
            return None
        squares = value.dequantized(torch.float32).float().square().sum(-1)
        B, _, C = squares.shape
        squares = squares.view(B, self.norm.shape[1], -1, C).sum(2)
        return (squares if self.joint is None else self.joint.sum(squares)).sqrt()

    def norms_of_rows(self) -> Tensor | None:
        """`norms` of the held values."""
        return self.norms(Rows(self.values, self.value_scale))

    def candidates(self, query_position: Tensor, value: Rows) -> tuple[Tensor, Tensor, Tensor | None]:
        """Slots, then new tokens: position, importance and, where the policy uses it, norm; all [B, G, S + C].

        query_position [B, C]; rows [B, K, C, D]
        """
        (B, G, S), C = self.position.shape, query_position.shape[1]
        position = torch.cat([self.position, query_position[:, None].expand(B, G, C)], dim=-1)
        importance = torch.zeros(position.shape, dtype=torch.float32, device=position.device)
        if self.importance is not None:
            importance[..., :S] = self.importance
        fresh = self.norms(value)
        norm = None if self.norm is None or fresh is None else torch.cat([self.norm, fresh], dim=-1)
        return position, importance, norm

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the dtype that the model computes in."""
        return Rows(self.keys, self.key_scale).dequantized(self.dtype), Rows(self.values, self.value_scale).dequantized(
            self.dtype
        )

    def write(self, slot: Tensor, key: Rows, value: Rows, norm: Tensor | None) -> None:
        """Write rows [B, K, C, D] and the norms [B, G, C] of their values into slot [B, G, C]."""
        if self.norm is not None and norm is not None:
            self.norm.scatter_(-1, slot, norm)
        for buffer, scales, fresh in ((self.keys, self.key_scale, key), (self.values, self.value_scale, value)):
            if scales is not None and fresh.scale is not None:
                scales.scatter_(2, slot.expand(fresh.scale.shape), fresh.scale)
            # Codes are moved as int8: not every 8-bit float can be scattered.
            into, rows = (t.view(torch.int8) if self.state_dtype else t for t in (buffer, fresh.codes))
            into.scatter_(2, slot[..., None].expand(rows.shape), rows)

    def keep(
        self, key: Rows, value: Rows, position: Tensor, importance: Tensor, norm: Tensor | None, held: Tensor
    ) -> None:
        """After a chunk: free the slots of evicted tokens, and move the new tokens that are still held into free slots.

        Rows [B, K, C, D]; position, importance, norm, held [B, G, S + C]: slots, then new tokens.
        """
        S = self.position.shape[-1]
        old, new = held[..., :S], held[..., S:]
        free = old.to(torch.int8).argsort(dim=-1, stable=True)
        # Evicted new tokens all go to the one slot that stays free: there are size + 1 slots.
        rank = torch.where(new, new.cumsum(-1) - 1, new.sum(-1, keepdim=True))
        slot = free.gather(-1, rank)
        self.position.masked_fill_(~old, -1)
        self.position.scatter_(-1, slot, position[..., S:].masked_fill(~new, -1))
        if self.importance is not None:
            self.importance.copy_(importance[..., :S])
            self.importance.scatter_(-1, slot, importance[..., S:])
        self.write(slot, key, value, None if norm is None else norm[..., S:])


class Growing(_Buffers):
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


Memory = Slots | Growing
