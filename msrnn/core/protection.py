"""Protected tokens: ranges of positions whose KV rows are never evicted.

A state has RANGES ranges [begin, end) for each sequence, the same in every layer; an empty range has end <= begin.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from msrnn.bound import Bound
from msrnn.errors import UsageError

RANGES = 4


def no_ranges(batch_size: int, device: torch.device) -> Tensor:
    """[B, RANGES, 2] int32, all empty."""
    return torch.zeros(batch_size, RANGES, 2, dtype=torch.int32, device=device)


def hide_protected(position: Tensor, ranges: Tensor | None) -> Tensor:
    """The positions [B, G, N] that a policy may choose from: -1, as for an empty slot, where a token is protected."""
    if ranges is None:
        return position
    begin, end = ranges[:, None, :, None].unbind(-1)  # [B, 1, RANGES, 1]
    at = position[:, :, None]
    return position.masked_fill(((begin <= at) & (at < end)).any(2), -1)


def count_protected(ranges: Tensor, first: int) -> Tensor:
    """How many tokens of each sequence are protected, without its `first` tokens: [B]"""
    begin, end = ranges.clamp(min=first).unbind(-1)
    return (end - begin).clamp(min=0).sum(-1)


def add_ranges(ranges: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """The ranges with [begin, end) of each sequence as well, both [B]; a range that ends at `begin` is extended."""
    ranges = ranges.clone()
    for own, start, stop in zip(ranges, begin.tolist(), end.tolist(), strict=True):
        if start == stop:
            continue
        free = own[:, 1] <= own[:, 0]
        adjacent = ~free & (own[:, 1] == start)
        if not bool((adjacent | free).any()):
            raise UsageError(
                f"a state has at most {RANGES} separate ranges of protected tokens",
                name="protect",
                value=True,
                advice="release() the earlier ones first",
            )
        if bool(adjacent.any()):
            own[adjacent, 1] = stop
        else:
            own[int(free.nonzero()[0])] = torch.tensor([start, stop], dtype=own.dtype)
    return ranges


def forget_unread(ranges: Tensor, seen: Tensor) -> Tensor:
    """The ranges without tokens that were not read; seen [B] were. An empty range is [0, 0)."""
    ranges = torch.minimum(ranges, seen[:, None, None].to(ranges.dtype))
    return ranges.masked_fill(ranges[..., 1:] <= ranges[..., :1], 0)


def check_fits(ranges: Tensor, bounds: Iterable[Bound], new: Tensor) -> None:
    """Refuse protected tokens that would leave the policy of a layer fewer than recent + 1 rows; new [B] of them."""
    for bound in sorted({bound for bound in bounds if bound.protects}, key=count_room):
        most, protected = count_room(bound), count_protected(ranges, bound.policy.first)
        excess = int((protected - most).max())
        if excess > 0:
            sequence = int((protected - most).argmax())
            asked = int(new[sequence])
            earlier = int(protected[sequence]) - asked
            before = f", and {earlier:,} are protected already" if earlier > 0 else ""
            raise UsageError(
                f"{asked:,} tokens: {max(0, asked - excess):,} fit; of {bound.size:,} KV rows per layer, the policy "
                f"needs {bound.size - most:,} for itself{before}",
                name="protect",
                value=True,
                advice="protect fewer tokens, release() the earlier ones, or use a larger size",
            )


def count_room(bound: Bound) -> int:
    """The largest number of tokens that can be protected in a layer, without its first tokens."""
    return bound.size - bound.policy.first - bound.recent - 1
