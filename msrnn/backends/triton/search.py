"""The search of a recall on a GPU: which archived tokens the queries of a block would attend to most.

Ranks of all tokens (`block_search.py`, or `single_search.py` for one query), then the first of them (`selection.py`).
A search reads 8-bit copies of all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from msrnn import recall
from msrnn.backends.triton.block_search import rank_block
from msrnn.backends.triton.copied_keys import splits_queries
from msrnn.backends.triton.selection import select_triton
from msrnn.backends.triton.single_search import mark_held, rank_single
from msrnn.backends.triton.streams import SideStreams
from msrnn.core import paged_slots
from msrnn.core.guests import find_held
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.scores import Scoring

SCORES = 2**28  # that there is room for; more KV heads are ranked one after the other
PART_BYTES, PARTS = 2**26, 4  # copied keys that are worth a part of the search, and the most parts

Then = Callable[[Tensor, slice], None]


def search_triton(
    slots: PagedSlots, query: Tensor, key: Tensor, position: Tensor, scoring: Scoring, then: Then | None = None
) -> Tensor:
    """The guests [B, K, n] of a block of each sequence, as `select_kernel` places them; see `find_guests`.

    query [B, H, T, D] and position [B, T] are contiguous; key [B, K, T, D]. Where there is much to search, heads are
    searched in parts: `then(guests, part)` fetches those of some heads while the next are searched.
    """
    (B, H, T, D), K, N = query.shape, key.shape[1], slots.segments * recall.SEGMENT
    whole = partial(torch.empty, dtype=torch.int32, device=query.device)
    ranks, tops, places = whole(B, K, N), whole(B, K, N // paged_slots.TILE), whole(slots.guest_position.shape)
    held = _find_held(slots, position)
    single = H == K and T == 1 and splits_queries(query)
    marks = mark_held(held, N) if single else None
    streams = SideStreams(query.device)
    parts = _divide(B * K, H // K * T * N, B * K * N * D if single else 0)
    try:
        for part in parts:
            if marks is not None:
                rank_single(slots, query, position, marks, part, ranks, tops)
            else:
                rank_block(slots, query, key, position, held, scoring, part, ranks, tops)
            with streams.beside() if part is not parts[-1] else nullcontext():
                select_triton(ranks, tops, position, slots.guest_position, places, part)
                if then is not None:
                    then(places, part)
    finally:
        streams.join()
    return places


def _divide(heads: int, scores: int, nbytes: int) -> list[slice]:
    """Parts of the KV heads: with this number of scores for each, and these bytes for all."""
    parts = max(1, min(PARTS, nbytes // PART_BYTES))
    each = max(1, min(-(-heads // parts), SCORES // scores))
    return [slice(first, min(first + each, heads)) for first in range(0, heads, each)]


def _find_held(slots: PagedSlots, position: Tensor) -> Tensor:
    if slots.bound.window is None:
        return slots.position
    return find_held(slots, torch.where(position >= 0, position, 2**31 - 1).amin(-1))
