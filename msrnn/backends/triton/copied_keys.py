"""The 8-bit copies of archived keys, on the device: where kernels find them, and queries as they multiply them.

A table [B, SEGMENTS, 3] has the addresses of all segments of an archive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn import recall
from msrnn.backends.triton.selection import FAR, first_position
from msrnn.core import paged_slots
from msrnn.core.paged_slots import PagedSlots

SEGMENT = tl.constexpr(recall.SEGMENT)
ROWS, INDEX = tl.constexpr(paged_slots.ROWS), tl.constexpr(paged_slots.INDEX)
INDEX_SCALE = tl.constexpr(paged_slots.INDEX_SCALE)
FIELDS = tl.constexpr(len(paged_slots.FIELDS))
ALIGNED = tl.constexpr(16)  # bytes: the memory of segments begins at multiples of more
LEAST_BYTES = 32  # of a matrix product on tensor cores


@triton.jit
def locate(p_table, field: tl.constexpr, like, mask=None):
    """The addresses in a field of some lines of a table, as pointers of the type of `like`.

    Without a word on their alignment, rows would be read and written number by number.
    """
    return tl.multiple_of(
        tl.load(p_table + field, mask=mask, other=None if mask is None else 0).to(like.dtype), ALIGNED
    )


@triton.jit
def count_read(p_position, T):
    """The tokens before T columns; 0 where all are padding, since nothing is searched for then."""
    first = first_position(p_position, T)
    return tl.where(first == FAR, 0, first)


@triton.jit
def split_queries(b_q):
    """Queries [BQ, D] as two bytes per number and a scale [BQ]: b_q is about (256 * high + low) * scale.

    16 bits of the largest number of each query: what rounding a query to bfloat16 loses is more.
    """
    b_scale = tl.maximum(tl.max(tl.abs(b_q), axis=1), 1e-30) / (127 * 256)
    b_scaled = b_q / b_scale[:, None]
    b_whole = (b_scaled + tl.where(b_scaled < 0, -0.5, 0.5)).to(tl.int32)
    b_high = (b_whole + 128) >> 8
    return b_high.to(tl.int8), (b_whole - b_high * 256).to(tl.int8), b_scale


def splits_queries(query: Tensor) -> bool:
    """Whether queries are multiplied as bytes: those of 32 bits, or of few dimensions, are not."""
    return query.dtype != torch.float32 and query.shape[-1] >= LEAST_BYTES


def index_types(slots: PagedSlots) -> tuple[Tensor, Tensor]:
    """Tensors whose pointers have the types of the 8-bit keys and of their scales: the table itself has neither."""
    return slots.table.view(torch.int8), slots.table.view(torch.bfloat16)
