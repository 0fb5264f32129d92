"""Ranks of a block's queries by their definition: the largest attention, mean over the query heads of a KV head."""

from __future__ import annotations

import pytest
import torch

from msrnn.backends.triton.archive import archive_triton
from msrnn.backends.triton.block_search import rank_block
from msrnn.bound import Bound
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape
from msrnn.policy import Policy
from msrnn.recall import SEGMENT, Recall

HEADS, KV_HEADS, DIM, ARCHIVED = 4, 2, 16, 40


@pytest.mark.parametrize("block", [1, 3])
def test_ranks_are_the_bits_of_shares(block: int, device: str) -> None:
    shape = LayerShape(HEADS, KV_HEADS, DIM, DIM, torch.float32, torch.device(device), paged=True)
    slots = PagedSlots(1, shape, Bound(Policy.parse("tova"), 4, recall=Recall(8, search="int8")))
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, KV_HEADS, ARCHIVED + block, DIM, generator=generator).to(device)
    query = torch.randn(1, HEADS, block, DIM, generator=generator).to(device)
    slots.reserve(ARCHIVED)
    archive_triton(slots, key[:, :, :ARCHIVED], key[:, :, :ARCHIVED], slots.advance(ARCHIVED, None))
    slots.position[0, 0, :2] = torch.tensor([5, 30], dtype=torch.int32)
    position = torch.arange(ARCHIVED, ARCHIVED + block, dtype=torch.int32, device=device)[None]
    ranks = torch.full((1, KV_HEADS, SEGMENT), -7, dtype=torch.int32, device=device)
    tops = torch.full((1, KV_HEADS, SEGMENT // 64), -7, dtype=torch.int32, device=device)
    own = key[:, :, ARCHIVED:]
    rank_block(slots, query, own, position, slots.position, Scoring(0.5), slice(0, KV_HEADS), ranks, tops)
    slots.settle()
    (_, copied), *_ = slots.archives[0].keys_to_search()
    rows = torch.cat([copied.dequantized(torch.float32).to(device)[:, :ARCHIVED], own[0]], 1)
    scores = query[0].unflatten(0, (KV_HEADS, -1)) @ rows[:, None].transpose(-1, -2) * 0.5
    later = torch.ones(block, block, dtype=torch.bool, device=device).triu(1)
    scores[..., ARCHIVED:] = scores[..., ARCHIVED:].masked_fill(later, -torch.inf)
    expected = scores.softmax(-1)[..., :ARCHIVED].mean(1).amax(1)
    expected[:, [5, 30]] = -1.0
    found = ranks[0, :, :ARCHIVED]
    shares = torch.where(found < 0, -1.0, found.view(torch.float32))
    torch.testing.assert_close(shares, expected, atol=1e-5, rtol=1e-4)
    assert (ranks[0, :, ARCHIVED:] == -1).all()
    assert torch.equal(tops[0, :, 0], ranks[0, :, :64].amax(-1))
    assert (tops[0, :, 1:] == -1).all()
