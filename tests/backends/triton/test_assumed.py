"""The mean attention of a chunk's tokens as if it were known when candidates are evicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from msrnn.backends.triton import assumed
from msrnn.backends.triton.scan import room
from msrnn.core.slots import HELD

UNIT = 2.0**86
HEADS, HELD_ROWS, NEW, SIZE = 6, 10, 8, 10


@pytest.mark.parametrize("lifts", [True, False])
@pytest.mark.parametrize("knows", [True, False], ids=["some are evicted", "none is"])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_against_torch(lifts: bool, knows: bool, with_sinks: bool, device: str) -> None:
    """Evicted candidates are in no sum, but how a token would have attended to them is told where they came before."""
    torch.manual_seed(3)
    candidates, begin = HELD_ROWS + 1 + NEW, 2
    space = room(NEW, candidates)
    position = torch.cat([torch.randperm(HELD_ROWS), torch.tensor([-1]), torch.arange(HELD_ROWS, HELD_ROWS + NEW)])
    query = torch.arange(HELD_ROWS, HELD_ROWS + NEW).to(torch.int32)
    query[3] = -1  # padding
    position = position.to(torch.int32)[None, None]
    weights = torch.full((1, 1, space.rows, HEADS, space.width), torch.nan)
    weights[..., :candidates] = torch.rand(1, 1, space.rows, HEADS, candidates)
    sinks = torch.rand(1, 1, space.rows, HEADS) if with_sinks else None
    evicted_at = torch.full_like(position, HELD)
    if knows:
        evicted_at[0, 0, [1, 4]] = torch.tensor([HELD_ROWS + 3, HELD_ROWS + 5], dtype=torch.int32)
    there = [t if t is None else t.to(device) for t in (weights, sinks, position, query[None], evicted_at)]
    means = torch.full((1, 1, space.rows, space.width), -7.0, device=device)
    kernel: Any = assumed.assume_kernel
    kernel[(NEW - begin, 1, 1)](
        *there, None, None, means, SIZE, begin, NEW, candidates,
        G=1, M=HEADS, BC=space.rows, BN=space.left, BR=space.right, BM=4, LIFTS=lifts, SKIPS=False, INITIAL=True,
    )  # fmt: skip
    for i, t in enumerate(query.tolist()):
        row, found = weights[0, 0, i, :, :candidates].double(), means[0, 0, i, :candidates].cpu().double()
        if i < begin or t < 0:
            assert bool((found == -7).all())
            continue
        came = (position[0, 0] >= 0) & (position[0, 0] <= t)
        sees = came & (evicted_at[0, 0] >= t)
        total = (row * sees).sum(-1, keepdim=True) + (0 if sinks is None else sinks[0, 0, i, :, None].double())
        expected = (row * came / total).mean(0) * (UNIT if lifts else 1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
