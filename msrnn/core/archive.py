"""The archive of one layer and sequence: keys and values of every token that was read, in reading order.

Rows are only ever appended, in segments. A fork shares the segments of its origin; only a segment that both continue is
copied. The archive of a folder is in memory-mapped files that have no name: they are gone when the process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.core.device_memory import wait_for
from msrnn.core.quantization import SCALE_DTYPE, Rows, quantize
from msrnn.core.segment_folder import SegmentFile
from msrnn.core.segments import ArchiveLayout, Segment
from msrnn.core.shards import Shards
from msrnn.errors import UsageError
from msrnn.recall import SEGMENT

SMALLEST = 256  # tokens of the first one, which grows
ALL = slice(None)
MoveKeys = Callable[[Tensor, Tensor], Tensor]  # keys [..., N, D] at positions [..., N] -> keys with other rotations


class ArchivePart(NamedTuple):
    """Rows of consecutive tokens, as tensors of a file: those of one whole segment, if it has a file of its own."""

    tensors: dict[str, Tensor]
    file: SegmentFile | None = None


class Archive:
    """The archived rows of one layer and sequence: positions `begin` to `end` of its text."""

    def __init__(self, layout: ArchiveLayout) -> None:
        self.layout = layout
        self.begin = self.end = 0
        self.ahead = 0  # tokens that kernels may have written since, where the host does not know
        self._segments: list[Segment] = []
        self._shared = 0  # the number of first segments that other archives may have as well: these are not written to

    @property
    def nbytes(self) -> int:
        """Bytes of the rows; forks count what they share, each."""
        return (self.end - self.begin) * self.layout.row_bytes

    @property
    def shared(self) -> bool:
        """Whether some of its segments may be another archive's as well."""
        return bool(self._shared)

    @property
    def capacity(self) -> int:
        """The position up to which there is room, if no fork has to be written to."""
        return 0 if self._shared else self.begin + sum(segment.room for segment in self._segments)

    def fork(self) -> Archive:
        """An archive with the same rows, which can be continued on its own."""
        other = Archive(self.layout)
        other.become(self)
        return other

    def __deepcopy__(self, memo: dict[int, object]) -> Archive:
        """A fork: what is archived does not change."""
        return self.fork()

    def become(self, other: Archive) -> None:
        """Take the rows of another archive instead of its own; each can be continued on its own."""
        self._drop_segments()
        self.begin, self.end, self.ahead, self._segments = other.begin, other.end, other.ahead, list(other._segments)
        self._shared = len(self._segments)

    def clear(self) -> None:
        self._drop_segments()
        self.begin = self.end = self.ahead = self._shared = 0

    def _drop_segments(self) -> None:
        """Forget all segments, when nothing is written to them any more: their memory may be used again at once."""
        if self._segments:
            self._wait()
        self._segments = []

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append the rows [K, T, D] of the next T tokens, as the model computed them."""
        self.append_rows(quantize(key, self.layout.code), quantize(value, self.layout.code))

    def append_rows(self, key: Rows, value: Rows) -> None:
        """Append rows [K, T, D] as the archive keeps them."""
        done, count = 0, key.codes.shape[1]
        self.make_room(count)
        while done < count:
            index, used = divmod(self.end - self.begin, SEGMENT)
            n = min(SEGMENT - used, count - done)
            self._segments[index].write(used, *(_part(rows, done, done + n) for rows in (key, value)))
            done, self.end = done + n, self.end + n
        self._drop_oldest()

    def make_room(self, tokens: int) -> bool:
        """Make room for the next tokens -> whether the segments have changed."""
        if self.end + tokens <= self.capacity:
            return False
        first, used = divmod(self.end - self.begin, SEGMENT)
        needed = used + tokens
        if first < len(self._segments) and (first < self._shared or self._segments[first].room < min(needed, SEGMENT)):
            self._replace(first, used, needed)
        del self._segments[first + 1 : max(self._shared, first + 1)]  # a fork's room ahead
        self._shared = 0
        missing = needed - SEGMENT * (len(self._segments) - first)
        if missing > 0:
            rooms = [SEGMENT] * -(-missing // SEGMENT)
            if not self.layout.whole and not self._segments:
                rooms[0] = min(SEGMENT, max(SMALLEST, missing))
            self._segments += self.layout.segments(rooms)
        return True

    def _replace(self, index: int, used: int, needed: int) -> None:
        """Give the archive a segment of its own in place of one that is shared or too small, with the same rows."""
        self._wait()
        before = self._segments[index]
        (grown,) = self.layout.segments([min(SEGMENT, max(before.room, 2 * used, needed))])
        grown.write(0, *before.read(0, used))
        self._segments[index] = grown

    def _drop_oldest(self) -> None:
        most = self.layout.most_tokens
        while most is not None and self.end - self.begin > most and len(self._segments) > 1:
            del self._segments[0]
            self.begin += SEGMENT

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    def whole_segments(self) -> list[Segment]:
        """The first segments, whose rows are all there: these never change."""
        return self._segments[: (self.end - self.begin) // SEGMENT]

    def addresses(self) -> list[list[int]]:
        """Where a kernel finds the rows of each segment."""
        return [segment.addresses() for segment in self._segments]

    def segments(self, some: slice = ALL) -> Iterator[tuple[int, Rows, Rows]]:
        """The rows of all segments, or of some, in order: the position of the first, keys and values [K, n, D]."""
        for index in range(len(self._segments))[some]:
            first = self.begin + index * SEGMENT
            if first < self.end:
                yield first, *self._segments[index].read(0, min(SEGMENT, self.end - first))

    def keys_to_search(self) -> Iterator[tuple[int, Rows]]:
        """The keys that a search reads, in order: the position of the first, and rows [K, n, D]."""
        for segment, (first, keys, _) in zip(self._segments, self.segments(), strict=False):
            index = segment.index
            yield first, keys if index is None else _part(index, 0, keys.codes.shape[1])

    def gather(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [K, n, D] of positions [K, n], in the model's dtype, on the archive's device.

        Rows of positions that are not archived are zero.
        """
        at = position.to(self.layout.device).long()
        found = [torch.zeros(*at.shape, d, dtype=self.layout.dtype, device=at.device) for d in self._widths]
        for first, *both in self.segments():
            count = both[0].codes.shape[1]
            inside, index = (at >= first) & (at < first + count), (at - first).clamp(0, count - 1)
            for i, rows in enumerate(both):
                picked = _pick(rows, index).dequantized(self.layout.dtype)
                found[i] = torch.where(inside[..., None], picked, found[i])
        return found[0], found[1]

    @property
    def _widths(self) -> tuple[int, int]:
        return self.layout.key_dim, self.layout.value_dim

    def tensors(self, some: slice = ALL) -> dict[str, Tensor]:
        """All rows, or those of some segments, as tensors of a file: codes and, where they are quantized, scales."""
        self._wait()
        code, heads = self.layout.code or self.layout.dtype, self.layout.kv_heads
        tensors = {}
        for i, name in enumerate(("key", "value")):
            rows = [both[i] for _, *both in self.segments(some)]
            none = torch.empty(heads, 0, self._widths[i], dtype=code, device=self.layout.device)
            tensors[f"{name}s"] = torch.cat([none, *(part.codes for part in rows)], 1)
            if self.layout.code:
                scales = [part.scale for part in rows if part.scale is not None]
                tensors[f"{name}_scale"] = torch.cat([none[..., 0].to(SCALE_DTYPE), *scales], 1)
        return tensors

    def move_keys(self, move: MoveKeys) -> dict[str, Tensor]:
        """All rows as `tensors` gives them, with keys that `move` changes."""
        tensors = self.tensors()
        keys = Rows(tensors["keys"], tensors.get("key_scale")).dequantized(self.layout.dtype)
        position = torch.arange(self.begin, self.end, device=keys.device)
        moved = quantize(move(keys, position), self.layout.code)
        return {**tensors, "keys": moved.codes, **({} if moved.scale is None else {"key_scale": moved.scale})}

    def gather_heads(self, shards: Shards, device: torch.device, keeps: bool) -> Archive:
        """An archive with the heads of all processes, which must have the same positions and all call this.

        Rows travel by `device`, segment by segment. A process that does not keep them gets an empty archive.
        """
        self._wait()
        whole = Archive(self.layout.join_heads(shards))
        whole.begin = whole.end = self.begin
        for _, *both in self.segments():
            gathered = [rows.map(lambda part: shards.gather(part.to(device), 0)) for rows in both]
            if keeps:
                whole.append_rows(*gathered)
        return whole

    def pick_heads(self, layout: ArchiveLayout, shards: Shards) -> Archive:
        """An archive of `layout` with the heads of one process, of an archive that has all heads."""
        own, first = Archive(layout), shards.rank * layout.kv_heads
        own.begin = own.end = self.begin
        for _, *both in self.segments():
            own.append_rows(*(rows.pick_heads(slice(first, first + layout.kv_heads)) for rows in both))
        return own

    def _wait(self) -> None:
        """Wait until a GPU has written what it was told to: the host is about to read it."""
        if self.layout.pinned_for is not None:
            wait_for(self.layout.pinned_for)

    def restore(
        self, parts: Sequence[ArchivePart], begin: int, restored: dict[SegmentFile, Segment] | None = None
    ) -> None:
        """Replace all rows by those of files, the first of which has position `begin`.

        A segment whose file is in `restored` is shared; those of other files are added to it.
        """
        self.clear()
        self.begin = self.end = begin
        restored = {} if restored is None else restored
        for part in parts:
            if part.file in restored:
                self._segments.append(restored[part.file])
                self.end += SEGMENT
                self._drop_oldest()
                continue
            self._check(part.tensors)
            rows = (Rows(part.tensors[f"{name}s"], part.tensors.get(f"{name}_scale")) for name in ("key", "value"))
            self.append_rows(*rows)
            if part.file is not None:
                restored[part.file] = self.whole_segments()[-1]
                restored[part.file].file = part.file

    def check_finite(self) -> None:
        """Refuse rows that are not finite. Segments that have a file were checked before."""
        for number, segment in enumerate(self._segments):
            if segment.file is None:
                check_finite(self.tensors(slice(number, number + 1)))

    def _check(self, tensors: dict[str, Tensor]) -> None:
        """Refuse tensors that are not rows of this archive."""
        heads, count = self.layout.kv_heads, tensors["keys"].shape[1:2].numel()
        for name, width in zip(("key", "value"), self._widths, strict=True):
            expected = {f"{name}s": ([heads, count, width], self.layout.code or self.layout.dtype)}
            if self.layout.code:
                expected[f"{name}_scale"] = [heads, count], SCALE_DTYPE
            for part, (shape, dtype) in expected.items():
                found = tensors[part]
                if list(found.shape) != shape or found.dtype != dtype:
                    raise UsageError(f"archived {part} of {found.dtype} {list(found.shape)}, not {dtype} {shape}")


def check_finite(tensors: dict[str, Tensor]) -> None:
    """Refuse archived rows that are not finite, and scales that no row has."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            continue
        numbers = tensor.float() if tensor.itemsize == 1 else tensor  # 8-bit floats have NaN
        if not bool(numbers.isfinite().all()):
            raise UsageError(f"archived {name} that are not finite")
        if name.endswith("_scale") and not bool((numbers > 0).all()):
            raise UsageError(f"archived {name} that are not above 0")


def _part(rows: Rows, begin: int, end: int) -> Rows:
    return rows.map(lambda tensor: tensor[:, begin:end])


def _pick(rows: Rows, index: Tensor) -> Rows:
    """Rows [K, n, D] at index [K, n]."""
    codes = rows.codes.view(torch.int8) if rows.codes.itemsize == 1 else rows.codes  # not every 8-bit float has it
    picked = codes.gather(1, index[..., None].expand(*index.shape, codes.shape[-1]))
    return Rows(picked.view(rows.codes.dtype), None if rows.scale is None else rows.scale.gather(1, index))
