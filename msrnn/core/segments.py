"""Segments of an archive: rows of consecutive tokens, in the host's memory, on a device, or in a memory-mapped file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from msrnn.core.pinned_memory import PINNED
from msrnn.core.quantization import SCALE_DTYPE, Rows, quantize
from msrnn.core.segment_folder import SegmentFile
from msrnn.core.shards import Shards
from msrnn.core.slots import ordinary_tensors


@dataclass(frozen=True)
class ArchiveLayout:
    """Heads, dimensions and dtype of archived rows, and where they are."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype  # that the model computes in
    code: torch.dtype | None  # of 8-bit codes; None: rows are not quantized
    device: torch.device  # of the archive
    pinned_for: torch.device | None = None  # a GPU, which copies from and to it without waiting
    folder: Path | None = None
    most_tokens: int | None = None  # the oldest segments are dropped beyond it
    whole: bool = False  # segments are whole from the beginning: kernels write to them
    index_on: torch.device | None = None  # where 8-bit copies of the keys are kept for searches; None: there are none

    def join_heads(self, shards: Shards) -> ArchiveLayout:
        """The layout of archives with the heads of all processes: in main memory, and not for searches by kernels."""
        return ArchiveLayout(
            self.kv_heads * shards.count,
            self.key_dim,
            self.value_dim,
            self.dtype,
            self.code,
            torch.device("cpu"),
            most_tokens=self.most_tokens,
        )

    @property
    def row_bytes(self) -> int:
        """The bytes of one token's rows."""
        scales = 2 * SCALE_DTYPE.itemsize if self.code else 0
        return self.kv_heads * ((self.key_dim + self.value_dim) * (self.code or self.dtype).itemsize + scales)

    @property
    def index_row_bytes(self) -> int:
        """The bytes of the 8-bit copies of one token's keys, where there are any."""
        return 0 if self.index_on is None else self.kv_heads * (self.key_dim + SCALE_DTYPE.itemsize)

    def allocate(self, tokens: int, width: int | None, dtype: torch.dtype) -> Tensor:
        """[K, tokens, width], or [K, tokens] without a width."""
        shape = (self.kv_heads, tokens) if width is None else (self.kv_heads, tokens, width)
        count = self.kv_heads * tokens * (width or 1)
        if self.pinned_for is not None:
            nbytes = count * dtype.itemsize
            return PINNED.take(nbytes, self.pinned_for)[:nbytes].view(dtype).view(shape)
        if self.folder is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="msrnn-archive-") as file:
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)

    def allocate_rows(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [K, tokens, D]. For kernels, those of a token are side by side: they are fetched together."""
        if self.whole:
            rows = self.allocate(tokens, self.key_dim + self.value_dim, dtype)
            return rows[..., : self.key_dim], rows[..., self.key_dim :]
        return self.allocate(tokens, self.key_dim, dtype), self.allocate(tokens, self.value_dim, dtype)

    @ordinary_tensors
    def segments(self, rooms: Sequence[int]) -> list[Segment]:
        """Allocate segments with room for these numbers of tokens; one allocation has the 8-bit copies of all."""
        if self.index_on is None:
            return [Segment(self, room, None) for room in rooms]
        shape = (len(rooms), self.kv_heads, max(rooms), self.key_dim)
        codes = torch.empty(shape, dtype=torch.int8, device=self.index_on)
        scales = torch.empty(shape[:3], dtype=SCALE_DTYPE, device=self.index_on)
        return [Segment(self, room, Rows(codes[i], scales[i])) for i, room in enumerate(rooms)]


class Segment:
    """Rows of consecutive tokens, and 8-bit copies of their keys where a search uses them."""

    def __init__(self, layout: ArchiveLayout, room: int, index: Rows | None) -> None:
        code, self.room = layout.code or layout.dtype, room
        self.file: SegmentFile | None = None  # that has its rows, if it is whole; they were checked then
        self.keys, self.values = layout.allocate_rows(room, code)
        self.key_scale, self.value_scale = (
            layout.allocate(room, None, SCALE_DTYPE) if layout.code else None for _ in range(2)
        )
        self.index = index

    def write(self, begin: int, key: Rows, value: Rows) -> None:
        """Write rows [K, n, D] at `begin`."""
        end = begin + key.codes.shape[1]
        for rows, scales, fresh in ((self.keys, self.key_scale, key), (self.values, self.value_scale, value)):
            rows[:, begin:end].copy_(fresh.codes, non_blocking=True)
            if scales is not None and fresh.scale is not None:
                scales[:, begin:end].copy_(fresh.scale, non_blocking=True)
        if self.index is not None and self.index.scale is not None:
            copies = quantize(key.to(self.index.codes.device).dequantized(torch.float32), torch.int8)
            self.index.codes[:, begin:end] = copies.codes
            if copies.scale is not None:
                self.index.scale[:, begin:end] = copies.scale

    def read(self, begin: int, end: int) -> tuple[Rows, Rows]:
        """Keys and values of some of its tokens; views."""
        scales = [None if s is None else s[:, begin:end] for s in (self.key_scale, self.value_scale)]
        return Rows(self.keys[:, begin:end], scales[0]), Rows(self.values[:, begin:end], scales[1])

    def addresses(self) -> list[int]:
        """Where a kernel finds the rows, 8-bit copies of the keys and their scales."""
        rows = (self.keys, *(self.index or (None, None)))
        return [0 if one is None else one.data_ptr() for one in rows]
