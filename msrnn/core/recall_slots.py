"""The slots of a layer that recalls: every row goes to an archive, and some rows come back as guests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from msrnn.bound import Bound
from msrnn.core.archive import Archive, ArchivePart, MoveKeys
from msrnn.core.quantization import parse_state_dtype
from msrnn.core.segment_folder import SegmentFile
from msrnn.core.segments import ArchiveLayout, Segment
from msrnn.core.shards import check_same
from msrnn.core.slots import LayerShape, Slots, ordinary_tensors
from msrnn.errors import UsageError
from msrnn.recall import DEVICE, INT8, Recall


class RecallSlots(Slots):
    """Slots, an archive for each sequence, and the guests of each KV head, which a recall replaces."""

    @ordinary_tensors
    def __init__(self, batch_size: int, shape: LayerShape, bound: Bound) -> None:
        super().__init__(batch_size, shape, bound)
        assert bound.recall is not None
        self.recall, self.reach = bound.recall, shape.reach
        guests = (batch_size, shape.kv_heads, bound.recall.rows)
        self.guest_keys = torch.zeros(*guests, shape.key_dim, dtype=shape.dtype, device=shape.device)
        self.guest_values = torch.zeros(*guests, shape.value_dim, dtype=shape.dtype, device=shape.device)
        self.guest_position = torch.full(guests, -1, dtype=torch.int32, device=shape.device)
        self._layout = archive_layout(shape, bound.recall)
        self.archives = [Archive(self._layout) for _ in range(batch_size)]

    @staticmethod
    def nbytes_of(batch_size: int, shape: LayerShape, bound: Bound) -> int:
        """The bytes on the model's device."""
        row = shape.kv_heads * ((shape.key_dim + shape.value_dim) * shape.dtype.itemsize + 4)
        return Slots.nbytes_of(batch_size, shape, bound) + batch_size * bound.guests * row

    def archive_nbytes(self, seen: Sequence[int]) -> int:
        counted = zip(self.archives, seen, strict=True)
        return sum((end - archive.begin) * archive.layout.row_bytes for archive, end in counted)

    def head_tensors(self) -> set[str]:
        return super().head_tensors() | {"guest_keys", "guest_values", "guest_position"}

    def archive(self, key: Tensor, value: Tensor, real: Tensor | None) -> None:
        """Append the rows [B, K, T, D] of the tokens that were read; real [B, T] is False for padding."""
        for b, archive in enumerate(self.archives):
            rows = (x[b] if real is None else x[b][:, real[b]] for x in (key, value))
            archive.append(*rows)

    def reserve(self, columns: int) -> None:
        """Make room for the next columns. A fork gets a copy of its last segment now, before it is written to."""
        for archive in self.archives:
            archive.make_room(columns)

    def begin_read(self, columns: int) -> None:
        self.reserve(columns)

    def gather_heads(self, archives: bool = True) -> Any:
        whole = super().gather_heads(archives)
        if self.shards is None:
            return whole
        self.settle()
        device = self.seen.device
        ends = torch.tensor([[archive.begin, archive.end] for archive in self.archives], device=device)
        check_same(ends, self.shards, "the processes that share this layer have archived other tokens")
        whole._layout = self._layout.join_heads(self.shards)
        return _with_archives(whole, (one.gather_heads(self.shards, device, archives) for one in self.archives))

    def divide(self, like: Any) -> Any:
        part = super().divide(like)
        if like.shards is None:
            return part
        own = object.__new__(type(like))  # kernels may search its archives, and not those that have all heads
        vars(own).update(vars(part), _layout=like._layout)
        own.replace_archives(archive.pick_heads(like._layout, like.shards) for archive in self.archives)
        return own

    def replace_archives(self, archives: Iterable[Archive]) -> None:
        """Have other archives, one for each sequence."""
        self.archives = [*archives]

    def share_buffers(self) -> Any:
        return _with_archives(super().share_buffers(), (Archive(self._layout) for _ in self.archives))

    def settle(self) -> None:
        """Let the host know how many tokens are archived, where kernels archive them."""

    def set_guests(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        """Replace the guests of one sequence: [K, n, D], [K, n, Dv], [K, n]; n may be less than there is room for."""
        n = position.shape[1]
        self.guest_keys[0, :, :n], self.guest_values[0, :, :n] = keys, values
        self.guest_position[0, :, :n], self.guest_position[0, :, n:] = position, -1

    def clear_guests(self, sequences: Tensor | None = None) -> None:
        """Let all sequences have no guests, or those where [B] is True."""
        if sequences is None:
            self.guest_position.fill_(-1)
        else:
            self.guest_position.masked_fill_(sequences[:, None, None], -1)

    def reset(self) -> None:
        super().reset()
        self.clear_guests()
        for archive in self.archives:
            archive.clear()

    @property
    def searches_copies(self) -> bool:
        """Whether a search reads 8-bit copies of the archived keys."""
        return self._layout.index_on is not None

    @property
    def most_archived(self) -> int | None:
        """The tokens that an archive keeps, the oldest being dropped; None: all."""
        return self._layout.most_tokens

    @property
    def kind(self) -> Any:
        return type(self), self.searches_copies, self.most_archived

    @property
    def archived_names(self) -> list[str]:
        """The tensors of an archive in a file."""
        return [*Archive(self._layout).tensors()]

    def restore_archives(self, parts: Sequence[Sequence[ArchivePart]], begins: list[int]) -> None:
        """Replace the archives by those of files: the parts of each sequence, and its first position."""
        archives, restored = [Archive(self._layout) for _ in parts], dict[SegmentFile, Segment]()
        for archive, rows, begin, seen in zip(archives, parts, begins, self.seen.tolist(), strict=True):
            archive.restore(rows, begin, restored)
            if archive.end != seen or begin < 0:
                raise UsageError(f"an archive of positions {begin:,} to {archive.end:,}, and {seen:,} tokens were read")
        self.replace_archives(archives)

    def take_rows(self, other: RecallSlots, move: MoveKeys | None = None) -> None:
        """Take the rows, guests and archives of another layer, whose archives may be of another kind.

        `move` changes the keys of archive and guests, where only one of both layers has them without their rotation.
        """
        for name, tensor in self.saved_tensors.items():
            tensor.copy_(getattr(other, name))
        if move is not None:
            self.guest_keys.copy_(move(self.guest_keys, self.guest_position))
        if move is None and type(self) is type(other) and self._layout == other._layout:
            self.take_archives(range(self.batch_size), other, range(self.batch_size))
            return
        other.settle()
        self.restore_archives(
            [
                [ArchivePart(archive.tensors() if move is None else archive.move_keys(move))]
                for archive in other.archives
            ],
            [archive.begin for archive in other.archives],
        )

    def take_archives(self, numbers: Sequence[int], other: Any, sources: Sequence[int]) -> None:
        forks = [other.archives[source].fork() for source in sources]
        for number, fork in zip(numbers, forks, strict=True):
            self.archives[number].become(fork)  # in place: views have the same archives

    def clear_archive(self, number: int) -> None:
        super().clear_archive(number)
        self.archives[number].clear()

    def select(self, sequences: Tensor) -> Any:
        return _with_archives(super().select(sequences), (self.archives[i].fork() for i in sequences.tolist()))

    def view(self, sequences: slice) -> Any:
        return _with_archives(super().view(sequences), self.archives[sequences])

    def copy(self, sequences: slice) -> Any:
        return _with_archives(super().copy(sequences), (archive.fork() for archive in self.archives[sequences]))

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        return _with_archives(super().to(device, non_blocking), (archive.fork() for archive in self.archives))

    def cat(self, layers: Sequence[Any], columns: int) -> Any:
        archives = [archive.fork() for layer in layers for archive in layer.archives]
        return _with_archives(super().cat(layers, columns), archives)

    def reorder(self, sequences: Tensor) -> None:
        super().reorder(sequences)
        self.take_archives(range(len(sequences)), self, sequences.tolist())


def _with_archives(slots: RecallSlots, archives: Iterable[Archive]) -> RecallSlots:
    slots.archives = [*archives]
    return slots


def archive_layout(shape: LayerShape, recall: Recall) -> ArchiveLayout:
    """How a layer's archive keeps its rows, and where."""
    on_device = recall.archive == DEVICE
    device = shape.device if on_device else torch.device("cpu")
    return ArchiveLayout(
        shape.kv_heads,
        shape.key_dim,
        shape.value_dim,
        shape.dtype,
        parse_state_dtype(recall.state_dtype) or shape.state_dtype,
        device,
        whole=shape.paged,
        pinned_for=shape.device if shape.device.type == "cuda" and not on_device and recall.folder is None else None,
        folder=recall.folder,
        most_tokens=shape.archived,
        index_on=shape.device if shape.paged or recall.search == INT8 else None,
    )
