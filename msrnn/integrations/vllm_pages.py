"""Pages: the memory of a request in a layer, which holds the buffers of a bounded layer.

A page is a whole state: rows, positions, importances and row weights. So a page that is given to another request takes
nothing along. Each buffer of all pages lies in one piece, since kernels find a page by its number; a page is a number
for whoever allocates it, and its bytes are next to each other only within a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from msrnn.backends.base import Backend
from msrnn.bound import Bound
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots, ordinary_tensors
from msrnn.layer import attend

ALIGNMENT = 64  # bytes, of a page and of each buffer
SHORT = 16  # the smallest width that prompts are padded to; wider ones are powers of two, then whole chunks
CHUNK = 128  # tokens of padded prompts that are scored at once


@cache
def measure_page(shape: LayerShape, bound: Bound) -> int:
    """Bytes of a page."""
    return max(end for _, end in _places(Slots(0, shape, bound)).values())


def _places(slots: Slots) -> dict[str, tuple[int, int]]:
    """First and last byte of each buffer, for one page; for n pages it is n times as much."""
    places, begin = {}, 0
    for name, tensor in slots.tensors().items():
        end = begin + -(-math.prod(tensor.shape[1:]) * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        places[name] = begin, end
        begin = end
    return places


def pad_width(tokens: int) -> int:
    """The width that a prompt is padded to, so that there are few shapes to compile kernels for."""
    width = SHORT
    while width < min(tokens, CHUNK):
        width *= 2
    return width if tokens <= width else -(-tokens // CHUNK) * CHUNK


class Pages:
    """The pages of a layer. `slots` are the buffers of all of them, as one batch.

    memory  [N, bytes] uint8, contiguous. All pages are made empty.
    """

    @ordinary_tensors
    def __init__(self, memory: Tensor, shape: LayerShape, bound: Bound) -> None:
        if not memory.is_contiguous():
            raise ValueError(f"pages with gaps between them (strides {memory.stride()} of {list(memory.shape)})")
        self.slots, flat, N = Slots(0, shape, bound), memory.view(-1), len(memory)
        empty = self.slots.tensors()
        for name, (begin, _) in _places(self.slots).items():
            like = empty[name]
            count = N * math.prod(like.shape[1:])
            buffer = flat[N * begin : N * begin + count * like.itemsize].view(like.dtype)
            setattr(self.slots, name, buffer.view(N, *like.shape[1:]))
        self.slots.reset()
        self._single: dict[int, Slots] = {}

    def view(self, page: int) -> Slots:
        """The buffers of one page, as a batch of one sequence."""
        if page not in self._single:
            self._single[page] = self.slots.view(slice(page, page + 1))
        return self._single[page]

    def read(
        self, page: int, begin: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, backend: Backend
    ) -> Tensor:
        """Read the tokens of a request from `begin` on: query [T, H, D], key and value [T, K, D] -> [T, H, Dv]."""
        slots = self.view(page)
        if begin == 0:
            slots.reset()
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        position = torch.arange(begin, begin + len(query), dtype=torch.int32, device=query.device)[None]
        return attend(slots, q, k, v, position, scoring, backend.default_chunk, backend)[0]

    def read_together(
        self,
        pages: Tensor,
        position: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
        backend: Backend,
    ) -> Tensor:
        """Read tokens of n requests: query [n, T, H, D], key and value [n, T, K, D] -> [n, T, H, Dv].

        pages [n] int64; position [n, T] int32, -1 for padding, which comes last. Nothing is read back to the host.
        """
        slots: Slots = self.slots.select(pages)
        slots.forget(position[:, 0] == 0)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        output = attend(slots, q, k, v, position, scoring, min(CHUNK, backend.default_chunk), backend)
        self.slots.put(pages, slots)
        return output

    def step(
        self,
        pages: Tensor,
        position: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
        backend: Backend,
    ) -> Tensor:
        """Read the next token of each of n requests: query [n, H, D], key and value [n, K, D] -> [n, H, Dv].

        pages [n] int64 and position [n] int32; where that is -1, it is padding, whose page no request may have.
        """
        q = query.unflatten(1, (key.shape[1], -1))
        return backend.decode_chosen(self.slots, pages, q, key, value, position, scoring).flatten(1, 2)


def group_widths(lengths: Sequence[int], most: int) -> list[tuple[int, list[int]]]:
    """Which prompts are read together: those of one padded width, at most `most` of them -> widths and indices."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(pad_width(length), []).append(index)
    return [
        (width, members[first : first + most])
        for width, members in groups.items()
        for first in range(0, len(members), most)
    ]
