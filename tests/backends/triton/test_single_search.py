"""A search by one query of each KV head against plain torch: the same guests, in parts of the heads or at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from msrnn.backends.triton import search
from msrnn.backends.triton.archive import archive_triton
from msrnn.backends.triton.recall import recall_triton
from msrnn.backends.triton.single_search import mark_held, rank_single
from msrnn.bound import Bound
from msrnn.core import paged_slots
from msrnn.core.guests import recall
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape
from msrnn.policy import Policy
from msrnn.recall import SEGMENT, Recall

BATCH, HEADS, DIM, GUESTS, HELD = 2, 4, 40, 8, 5
LENGTHS = [90, 30]


@pytest.fixture(autouse=True)
def one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_slots, "LEAST_SEGMENTS", 1)


def archived(device: str, policy: str) -> tuple[RecallSlots, PagedSlots, Tensor]:
    """Archives of two lengths, for plain torch and for kernels, and their keys; each group holds some other tokens."""
    shape = LayerShape(HEADS, HEADS, DIM, DIM, torch.float16, torch.device(device))
    bound = Bound(Policy.parse(policy), 12, recall=Recall(GUESTS, search="int8"))
    plain, paged = RecallSlots(BATCH, shape, bound), PagedSlots(BATCH, replace(shape, paged=True), bound)
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(BATCH, HEADS, max(LENGTHS), DIM, generator=generator).to(device, torch.float16)
    real = torch.arange(max(LENGTHS), device=device) < torch.tensor(LENGTHS, device=device)[:, None]
    for slots in (plain, paged):
        slots.reserve(max(LENGTHS))
        position = slots.advance(max(LENGTHS), real)
        if isinstance(slots, PagedSlots):
            archive_triton(slots, key, key, position)
        else:
            slots.archive(key, key, real)
        for group in range(slots.position.shape[1]):
            slots.position[:, group, :HELD] = torch.arange(HELD, dtype=torch.int32) * 3 + group
    return plain, paged, key


@pytest.mark.parametrize(("policy", "parts"), [("tova", 1), ("tova-head", 3)])  # one group, or one of each head
def test_guests_are_those_of_plain_torch(policy: str, parts: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PART_BYTES", 1)
    monkeypatch.setattr(search, "PARTS", parts)
    plain, paged, key = archived(device, policy)
    query = torch.randn(BATCH, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1)).to(device, torch.float16)
    at = torch.tensor(LENGTHS, dtype=torch.int32, device=device)[:, None]
    scoring = Scoring(0.5, 30.0)
    recall_triton(paged, query, key[:, :, -1:], at, scoring)
    for b, length in enumerate(LENGTHS):
        recall(plain.view(slice(b, b + 1)), query[b : b + 1], key[b : b + 1, :, -1:], length, scoring)
    expected, found = (slots.guest_position.sort(-1).values for slots in (plain, paged))
    assert torch.equal(found, expected)
    rows = paged.guest_position.long()[..., None].expand(-1, -1, -1, DIM)
    assert torch.equal(paged.guest_keys, key.gather(2, rows))
    assert torch.equal(paged.guest_values, key.gather(2, rows))


def test_padding_ranks_nothing_and_keeps_its_guests(device: str) -> None:
    _, paged, key = archived(device, "tova")
    paged.guest_position[1] = 17
    at = torch.tensor([[LENGTHS[0]], [-1]], dtype=torch.int32, device=device)
    query = torch.randn(BATCH, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1)).to(device, torch.float16)
    recall_triton(paged, query, key[:, :, -1:], at, Scoring(0.5))
    assert (paged.guest_position[1] == 17).all()
    assert (paged.guest_position[0] >= 0).all()


def test_ranks_have_the_order_of_scores(device: str) -> None:
    """Negative scores, too, and the low bytes of a query whose largest number says nothing."""
    _, paged, _ = archived(device, "tova")
    query = torch.randn(BATCH, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1)).to(device, torch.float16)
    query[..., 0] = 60.0
    at = torch.tensor(LENGTHS, dtype=torch.int32, device=device)[:, None]
    ranks, tops = (
        torch.full((BATCH, HEADS, n), -7, dtype=torch.int32, device=device) for n in (SEGMENT, SEGMENT // 64)
    )
    rank_single(paged, query, at, mark_held(paged.position, SEGMENT), slice(0, BATCH * HEADS), ranks, tops)
    paged.settle()
    for b, length in enumerate(LENGTHS):
        held = paged.position[b, 0, :HELD].tolist()
        free = [t for t in range(length) if t not in held]
        (_, rows), *_ = paged.archives[b].keys_to_search()
        scores = rows.dequantized(torch.float32).double().to(device)[:, :length] @ query[b, :, 0, :, None].double()
        ordered = scores[:, free, 0].gather(1, ranks[b][:, free].argsort(-1))
        assert (scores < 0).any()
        assert ordered.diff().min() > -0.02  # queries of 8 bits would be off by more than 1
        assert (ranks[b][:, held] == -1).all()
        assert torch.equal(tops[b, :, 0], ranks[b, :, :64].amax(-1))
        assert (tops[b, :, 2:] == -1).all()
