"""Sequences with a size of their own, below that of their layers.

Slots have the rows of the layer's bound. A sequence that may hold fewer leaves its last slots empty, so nothing but the
eviction scan knows its size. Per sequence, a layer has two numbers: by how much its `size` and its `recent` are lower
than those of the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from msrnn.bound import Bound, check_size
from msrnn.checks import is_whole
from msrnn.errors import UsageError


def no_fewer(batch_size: int, device: torch.device) -> Tensor:
    """[B, 2] int32: every sequence has the size of its layers."""
    return torch.zeros(batch_size, 2, dtype=torch.int32, device=device)


def make_fewer(bound: Bound, sizes: Sequence[int | None]) -> Tensor:
    """[B, 2] int32 of sequences with these sizes; None: that of the bound."""
    lower = [bound if size is None else lower_bound(bound, size) for size in sizes]
    return torch.tensor([[bound.size - own.size, bound.recent - own.recent] for own in lower], dtype=torch.int32)


def find_limits(bound: Bound, fewer: Tensor | None) -> tuple[int | Tensor, int | Tensor]:
    """The size and the number of recent tokens of each sequence, [B, 1, 1]; numbers where all have the bound's."""
    if fewer is None:
        return bound.size, bound.recent
    size, recent = fewer[:, :, None, None].unbind(1)
    return bound.size - size, bound.recent - recent


def lower_bound(bound: Bound, size: int) -> Bound:
    """The bound of a sequence of this size. A layer that holds its whole window keeps its own."""
    return bound if _holds_window(bound) else replace(bound, size=size)


def group_by_fewer(fewers: Iterable[Tensor]) -> dict[int, list[int]]:
    """Sequences by how many rows fewer they may hold, from the numbers of all layers."""
    groups: dict[int, list[int]] = {}
    for sequence, fewer in enumerate(torch.stack([one[:, 0].cpu() for one in fewers]).amax(0).tolist()):
        groups.setdefault(fewer, []).append(sequence)
    return groups


def join_fewer(bounds: Sequence[Bound], fewers: Sequence[Tensor]) -> Tensor | None:
    """The numbers of all layers as one of each sequence, for a file: its size [B] int32, or 0 for that of the layers.

    None: no sequence has a size of its own.
    """
    groups = group_by_fewer(fewers) if fewers else {}
    size = _find_size(bounds)
    if not any(groups) or size is None:
        return None
    sizes = torch.zeros(len(fewers[0]), dtype=torch.int32)
    for fewer, sequences in groups.items():
        sizes[sequences] = size - fewer if fewer else 0
    return sizes


def split_sizes(bounds: Sequence[Bound | None], sizes: Tensor) -> list[Tensor]:
    """The reverse of `join_fewer`, checked; a layer without a bound gets numbers that mean nothing."""
    own = [size or None for size in sizes.tolist()]
    for size in {size for size in own if size is not None}:
        check_own_size(bounds, size)
    return [no_fewer(len(own), sizes.device) if bound is None else make_fewer(bound, own) for bound in bounds]


def check_own_size(bounds: Sequence[Bound | None], size: int) -> None:
    """Refuse a size that a sequence cannot have in layers with these bounds; None: a layer keeps all tokens.

    Every layer must be as in a model of that size, but for its empty slots.
    """
    if not is_whole(size):
        raise UsageError("must be a whole number of KV rows", name="size", value=size)
    most = _find_size(bounds)
    if most is None:
        reason = "the layers have not one size that could be lower for a sequence"
        raise UsageError(reason, name="size", value=size, advice="leave it out")
    if size > most:
        raise UsageError(f"must be at most {most:,}, the KV rows of each layer", name="size", value=size)
    least = _find_least([bound for bound in bounds if bound is not None], most)
    if size < least:
        reason = f"must be at least {least:,} KV rows, which the policy and the layers need"
        raise UsageError(reason, name="size", value=size)


def _find_size(bounds: Iterable[Bound | None]) -> int | None:
    """The size that all layers have, beside those that hold their whole window; None: there is no such size."""
    chosen = (bound for bound in bounds if bound is None or not _holds_window(bound))
    sizes = {None if bound is None else bound.size for bound in chosen}
    return sizes.pop() if len(sizes) == 1 else None


def _find_least(bounds: Sequence[Bound], most: int) -> int:
    """The smallest size that the policy can have, and with which the same layers hold their whole window."""
    window = max((bound.size for bound in bounds if _holds_window(bound)), default=1)
    policy = next(bound.policy for bound in bounds if not _holds_window(bound))
    for size in range(window, most):
        try:
            check_size(policy, size)
        except UsageError:
            continue
        return size
    return most


def _holds_window(bound: Bound) -> bool:
    """Whether a layer evicts only what is outside its sliding window, whatever the size."""
    return bound.sliding and bound.window is None
