"""Tiles of candidates: how they rank, and which tokens come before the slots are full."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from msrnn.backends.triton.tiles import load_tile, rank, skip_rows
from msrnn.core.slots import HELD


@triton.jit  # type: ignore[untyped-decorator]
def rank_kernel(  # type: ignore[no-untyped-def]
    position, importance, start, weight, ranks, t, first, recent, N: tl.constexpr
):
    o_n = tl.arange(0, N)
    tile = load_tile(position, importance, start, None, 0, o_n, N, True)
    b_weight = None
    if weight is not None:
        b_weight = tl.load(weight + o_n)
    tl.store(ranks + o_n, rank(tile, b_weight, t, first, recent, True))


@pytest.mark.parametrize("weighs", [True, False])
def test_the_least_important_ranks_first_and_of_equal_ones_the_oldest(weighs: bool, device: str) -> None:
    """Protected, evicted, empty and later ones rank last; so does what is no number."""
    position = torch.tensor([5, 0, 9, -1, 7, 3, 4, 12, 8, 2, 6, 1, 11, 10, 13, 14], dtype=torch.int32)
    importance = torch.rand(16)
    importance[[2, 4]] = importance[5] = 0.25  # positions 9, 7 and 3
    importance[10] = torch.nan
    start = torch.full_like(position, HELD)
    start[8] = 8
    weight = torch.rand(16) + 0.5 if weighs else None
    if weight is not None:
        weight[[2, 4, 5]] = 1.0
    ranks = torch.empty(16, dtype=torch.int64, device=device)
    launch: Any = rank_kernel[(1,)]
    there = [None if given is None else given.to(device) for given in (position, importance, start, weight)]
    launch(*there, ranks, 12, 1, 2, N=16)
    expected = importance * (1 if weight is None else weight)
    free = (position >= 1) & (position <= 10) & (start == HELD)
    order = sorted(free.nonzero()[:, 0].tolist(), key=lambda n: (expected[n].nan_to_num(torch.inf).item(), position[n]))
    assert ranks.cpu().argsort()[: len(order)].tolist() == order
    assert bool((ranks.cpu()[~free] == 2**63 - 1).all())


@triton.jit  # type: ignore[untyped-decorator]
def skip_kernel(t, found, held, size, begin, C, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at, held = skip_rows(t, held, size, begin, C, N)
    tl.store(found, at)
    tl.store(found + 1, held)


@pytest.mark.parametrize(
    ("held", "begin", "expected"), [(3, 0, (3, 5)), (5, 0, (0, 5)), (3, 2, (4, 5)), (0, 0, (16, 5)), (5, 6, (16, 5))]
)
def test_tokens_before_the_slots_are_full_are_skipped(
    held: int, begin: int, expected: tuple[int, int], device: str
) -> None:
    """Five rows fit; the second token is padding, and so are those from the seventh on, of which there are none."""
    t = torch.tensor([10, -1, 11, 12, 13, 14] + [99] * 10, dtype=torch.int32, device=device)
    found, launch = torch.zeros(2, dtype=torch.int32, device=device), skip_kernel[(1,)]
    tokens: Any = launch
    tokens(t, found, held, 5, begin, 6, N=16)
    assert tuple(found.tolist()) == expected
