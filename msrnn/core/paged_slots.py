"""Slots whose archives are read and written by kernels: a table on the device has the addresses of all segments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from msrnn.bound import Bound
from msrnn.core.archive import Archive
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.slots import LayerShape, ordinary_tensors
from msrnn.errors import UsageError
from msrnn.recall import SEGMENT

MOST_SEGMENTS = 4096  # of a sequence
LEAST_SEGMENTS = 8  # that a search ranks: fewer would hardly take less time
MOST_AHEAD = 4  # reads of one length, until the host asks: their padding needs no room, but asking waits for the device
ROWS, INDEX, INDEX_SCALE = FIELDS = range(3)  # columns of the table
TILE = 64  # tokens that a search ranks together first


class PagedSlots(RecallSlots):
    """`RecallSlots` for kernels. They know how many tokens are archived: it is the position of the next one.

    The host knows it only when it asks the device, and otherwise how many it may be at most.
    """

    @ordinary_tensors
    def __init__(self, batch_size: int, shape: LayerShape, bound: Bound) -> None:
        super().__init__(batch_size, shape, bound)
        self.replace_archives(self.archives)

    @property
    def segments(self) -> int:
        """The segments that a search ranks: a power of two, so that captured graphs fit for long."""
        count = max(LEAST_SEGMENTS, -(-self.recall.rows * TILE // SEGMENT))
        count = max(count, *(archive.segment_count for archive in self.archives))
        return 1 << (count - 1).bit_length()

    @staticmethod
    def nbytes_of(batch_size: int, shape: LayerShape, bound: Bound) -> int:
        return RecallSlots.nbytes_of(batch_size, shape, bound) + batch_size * MOST_SEGMENTS * len(FIELDS) * 8

    @property
    def saved_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().saved_tensors.items() if name != "table"}

    def reserve(self, columns: int) -> None:
        short = [archive for archive in self.archives if archive.end + archive.ahead + columns > archive.capacity]
        if any(archive.shared or archive.ahead > MOST_AHEAD * columns for archive in short):
            self.settle()
        for number, archive in enumerate(self.archives):
            before = 0 if archive.shared else archive.segment_count
            if archive.make_room(archive.ahead + columns):
                self._write_addresses(number, archive.addresses(), before)

    def begin_read(self, columns: int) -> None:
        self.reserve(columns)
        for archive in self.archives:
            archive.ahead += columns

    def settle(self) -> None:
        for archive, seen in zip(self.archives, self.seen.tolist(), strict=True):
            archive.end, archive.ahead = seen, 0

    def __setstate__(self, values: dict[str, Any]) -> None:
        """After a copy or in another process, segments have other addresses."""
        vars(self).update(values)
        for number, archive in enumerate(self.archives):
            self._write_addresses(number, archive.addresses())

    def gather_heads(self, archives: bool = True) -> Any:
        whole = super().gather_heads(archives)
        if self.shards is None:
            return whole
        other = object.__new__(RecallSlots)  # the host searches archives in main memory
        vars(other).update({name: value for name, value in vars(whole).items() if name != "table"})
        return other

    @ordinary_tensors
    def replace_archives(self, archives: Iterable[Archive]) -> None:
        super().replace_archives(archives)
        if any(archive.begin for archive in self.archives):
            raise UsageError("archives without their oldest rows are searched by the host: use search='exact'")
        shape = len(self.archives), MOST_SEGMENTS, len(FIELDS)
        self.table = torch.zeros(shape, dtype=torch.int64, device=self.seen.device)
        for number, archive in enumerate(self.archives):
            self._write_addresses(number, archive.addresses())

    @ordinary_tensors
    def _write_addresses(self, number: int, addresses: list[list[int]], before: int = 0) -> None:
        """Write the addresses of segments to the table; of the first ones it has them before. The GPU need not wait."""
        if len(addresses) > MOST_SEGMENTS:
            raise UsageError(f"an archive of {MOST_SEGMENTS * SEGMENT:,} tokens is full: continue from an empty state")
        if addresses[before:]:
            fresh = torch.tensor(addresses[before:], pin_memory=self.table.is_cuda)
            self.table[number, before : len(addresses)].copy_(fresh, non_blocking=True)
