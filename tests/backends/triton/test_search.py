"""Searches where KV heads do not fit at once: they are ranked one after the other. `test_recall.py` has the rest."""

from __future__ import annotations

import pytest
import torch

from msrnn.backends.triton import search
from msrnn.backends.triton.archive import archive_triton
from msrnn.bound import Bound
from msrnn.core import paged_slots
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape
from msrnn.policy import Policy
from msrnn.recall import SEGMENT, Recall

BATCH, HEADS, KV_HEADS, DIM, TOKENS = 2, 4, 2, 16, 40


def test_heads_that_do_not_fit_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_slots, "LEAST_SEGMENTS", 1)
    shape = LayerShape(HEADS, KV_HEADS, DIM, DIM, torch.float32, torch.device(device), paged=True)
    bound = Bound(Policy.parse("tova"), 4, recall=Recall(8, search="int8"))
    slots = PagedSlots(BATCH, shape, bound)
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(BATCH, KV_HEADS, TOKENS, DIM, generator=generator).to(device)
    query = torch.randn(BATCH, HEADS, 1, DIM, generator=generator).to(device)
    slots.reserve(TOKENS)
    archive_triton(slots, key, key, slots.advance(TOKENS, None))
    position = torch.full((BATCH, 1), TOKENS - 1, dtype=torch.int32, device=device)
    step = slots, query, key[:, :, -1:], position, Scoring(0.5)
    at_once = search.search_triton(*step)
    monkeypatch.setattr(search, "SCORES", 3 * HEADS // KV_HEADS * SEGMENT)  # three heads, and then the last one
    assert torch.equal(search.search_triton(*step), at_once)
    assert len(set(map(tuple, at_once.flatten(0, 1).tolist()))) == BATCH * KV_HEADS  # each head has others
