"""Pages: one contiguous piece of memory per request and layer, which holds the buffers of a bounded layer.

A page is a whole state: rows, positions, importances, row weights, and the number of tokens read. So a page that is
given to another request takes nothing along, and a page that is moved loses nothing.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from msrnn.backends.base import Backend
from msrnn.bound import Bound
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.layer import attend

ALIGNMENT = 64  # bytes, of a page and of each buffer in it


@cache
def measure_page(shape: LayerShape, bound: Bound) -> int:
    """Bytes of a page."""
    return max(end for _, end in _places(Slots(0, shape, bound)).values())


def _places(slots: Slots) -> dict[str, tuple[int, int]]:
    """First and last byte of each buffer in a page."""
    places, begin = {}, 0
    for name, tensor in slots.tensors().items():
        end = begin + -(-math.prod(tensor.shape[1:]) * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        places[name] = begin, end
        begin = end
    return places


class Pages:
    """The pages of a layer. `slots` are the buffers of all of them, as one batch.

    memory  [N, bytes] uint8, where a page is contiguous. It is made empty.
    """

    def __init__(self, memory: Tensor, shape: LayerShape, bound: Bound) -> None:
        self.slots = Slots(0, shape, bound)
        empty = self.slots.tensors()
        for name, (begin, _) in _places(self.slots).items():
            like = empty[name]
            count = math.prod(like.shape[1:])
            buffer = memory[:, begin : begin + count * like.itemsize].view(like.dtype)
            setattr(self.slots, name, buffer.unflatten(1, like.shape[1:]) if like.dim() > 1 else buffer[:, 0])
        self.slots.position.fill_(-1)
        self.slots.seen.zero_()
        self._single: dict[int, Slots] = {}

    def view(self, page: int) -> Slots:
        """The buffers of one page, as a batch of one sequence."""
        if page not in self._single:
            self._single[page] = self.slots.view(slice(page, page + 1))
        return self._single[page]

    def read(self, page: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, backend: Backend) -> Tensor:
        """Read the next T tokens of a request: query [T, H, D], key and value [T, K, D] -> [T, H, Dv]."""
        slots = self.view(page)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        position = slots.advance(len(query), None)
        return attend(slots, q, k, v, position, scoring, backend.default_chunk, backend)[0]

    def step(
        self, pages: Tensor, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, backend: Backend
    ) -> Tensor:
        """Read the next token of each of n requests at once: query [n, H, D], key and value [n, K, D] -> [n, H, Dv].

        The batch is the whole pool, in which other pages are padding: nothing is gathered, and shapes are fixed.
        """
        N, K = self.slots.batch_size, key.shape[1]
        position = torch.full((N,), -1, dtype=torch.int32, device=query.device)
        position[pages] = self.slots.seen[pages].to(torch.int32)
        self.slots.seen[pages] += 1
        q, k, v = (x.new_zeros(N, *x.shape[1:]).index_copy(0, pages, x) for x in (query, key, value))
        return backend.decode(self.slots, q.unflatten(1, (K, -1)), k, v, position, scoring)[pages].flatten(1, 2)

    def clear(self, page: int) -> None:
        """Make a page empty, for a request that begins, or that begins again."""
        self.view(page).reset()
