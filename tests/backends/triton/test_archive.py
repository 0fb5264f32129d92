"""Rows that kernels archive and fetch: the same rows, at the places that are asked for, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from msrnn.backends.triton.archive import archive_triton, gather_triton
from msrnn.backends.triton.selection import STAYS
from msrnn.bound import Bound
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.slots import LayerShape
from msrnn.policy import Policy
from msrnn.recall import Recall

BATCH, KV_HEADS, TOKENS, GUESTS, DIM, VALUE_DIM = 2, 3, 50, 9, 16, 20


@pytest.mark.parametrize("place", ["host", "device"])
def test_rows_come_back_at_their_places(place: str, device: str) -> None:
    shape = LayerShape(KV_HEADS, KV_HEADS, DIM, VALUE_DIM, torch.float32, torch.device(device), paged=True)
    slots = PagedSlots(BATCH, shape, Bound(Policy.parse("tova"), 4, recall=Recall(GUESTS, archive=place)))
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(BATCH, KV_HEADS, TOKENS, d, generator=generator).to(device) for d in (DIM, VALUE_DIM))
    slots.reserve(TOKENS)
    archive_triton(slots, key, value, slots.advance(TOKENS, None))
    places = torch.randint(TOKENS, (BATCH, KV_HEADS, GUESTS), generator=generator, dtype=torch.int32).to(device)
    places[..., 2], places[..., 5] = int(STAYS), -1
    slots.guest_position.fill_(77)
    slots.guest_keys.fill_(7.0)
    gather_triton(slots, places, slice(1, BATCH * KV_HEADS))  # of all heads but the first
    assert (slots.guest_position[0, 0] == 77).all()
    assert (slots.guest_keys[0, 0] == 7).all()
    fetched = (places >= 0).flatten(0, 1)
    fetched[0] = False
    rows = places.clamp(min=0).long()[..., None]
    for guests, archived in ((slots.guest_keys, key), (slots.guest_values, value)):
        expected = archived.gather(2, rows.expand(-1, -1, -1, archived.shape[-1]))
        assert torch.equal(guests.flatten(0, 1)[fetched], expected.flatten(0, 1)[fetched])
    after = slots.guest_position.flatten(0, 1)
    assert torch.equal(after[fetched], places.flatten(0, 1)[fetched])
    assert (after[1:, 2] == 77).all()
    assert (after[1:, 5] == -1).all()
    assert (slots.guest_keys[..., 2, :] == 7).all()
