"""The weight of a KV row: a number that is computed once, when the row is appended, and that is stored beside it.

It multiplies the row's importance, or ranks the row alone where the policy observes nothing.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from msrnn.core.quantization import Rows
from msrnn.core.shards import Shards

_LARGEST = 2**32 - 1
SCRAMBLERS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))  # shifts and factors of MurmurHash3's 32-bit finalizer
Whole = TypeVar("Whole", int, Tensor)


def compute_norms(value: Rows, groups: int, joint: Shards | None) -> Tensor:
    """The norms [B, G, C] float32 of values [B, K, C, D] in all heads of a group, those of other processes included."""
    squares = sum_squares(value.dequantized(torch.float32), groups)
    return (squares if joint is None else joint.sum(squares)).sqrt()


def sum_squares(value: Tensor, groups: int) -> Tensor:
    """The squared norms [B, G, C] float32 of values [B, K, C, D]."""
    squares: Tensor = value.float().square().sum(-1).unflatten(1, (groups, -1)).sum(2)
    return squares


def draw_weights(position: Tensor, layer: int, groups: range) -> Tensor:
    """Pseudo-random float32 numbers [B, G, C] in [0, 1) of position [B, 1 or G, C], one group's unlike another's.

    They depend on nothing else, so that a text has the same ones however it is read, and by how many processes.
    """
    group = torch.arange(groups.start, groups.stop, device=position.device)[:, None]
    own = scramble((group + scramble(layer)) & _LARGEST)
    return (scramble(scramble(position.long() & _LARGEST) ^ own) >> 8).float() * 2.0**-24


def scramble(number: Whole) -> Whole:
    """A permutation of the whole numbers below 2**32 without a pattern; tensors are int64."""
    for shift, factor in SCRAMBLERS:
        number = number ^ (number >> shift)
        # in two parts, since a product of two numbers below 2**32 may not fit into int64
        number = (number * (factor & 0xFFFF) + ((number * (factor >> 16) & 0xFFFF) << 16)) & _LARGEST
    return number
