"""What a GPU's matrix units take, and how much of it at once."""

from __future__ import annotations

import torch
import triton

LEAST = 16  # rows, columns or dimensions of a product
BYTES = 2**14  # of rows at once: with what is on its way they fit into 99 KiB, the shared memory of GPUs from 8.0 on


def width(n: int) -> int:
    """A product's, that holds n."""
    return max(LEAST, int(triton.next_power_of_2(n)))


def at_once(most: int, dim: int, dtype: torch.dtype) -> int:
    """How many rows of so many dimensions."""
    return min(most, max(LEAST, BYTES // (width(dim) * dtype.itemsize)))
