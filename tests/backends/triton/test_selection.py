"""The selection of a search against torch.topk: ties, too few tokens, guests that stay at their places, padding.

`test_recall.py` has whole searches.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from msrnn.backends.triton.selection import STAYS, select_triton
from msrnn.core.paged_slots import TILE

HEADS, COUNT = 2, 10


def select(shares: Tensor, guests: Tensor, position: int = 10, chunk: int = 64) -> Tensor:
    """The places of the guests after a recall [HEADS, count]: small chunks, so that there are several of each."""
    ranks = shares.view(torch.int32).masked_fill(shares < 0, -1)
    tops = ranks.view(HEADS, -1, TILE).amax(-1).contiguous()
    at = torch.full((1, 1), position, dtype=torch.int32, device=shares.device)
    places = torch.full_like(guests, -3)
    select_triton(ranks[None], tops[None], at, guests[None], places[None], slice(0, HEADS), chunk)
    return places


def draw(device: str, tokens: int, valid: int, levels: int | None = None) -> Tensor:
    shares = torch.rand(HEADS, tokens, generator=torch.Generator().manual_seed(0)) ** 8
    if levels:
        shares = (shares * levels).floor() / levels  # many are equal
    shares[:, valid:] = -1.0
    shares[:, 3] = -1.0  # held
    return shares.to(device)


def no_guests(device: str, count: int = COUNT) -> Tensor:
    return torch.full((HEADS, count), -1, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("valid", "levels"),
    [(1024, None), (1024, 4), (1024, 1), (70, None), (15, None), (15, 2), (1, None), (0, None)],
)
def test_the_largest_shares_are_selected(valid: int, levels: int | None, device: str) -> None:
    shares = draw(device, 1024, valid, levels)
    places = select(shares, no_guests(device))
    expected = shares.topk(COUNT).values.sort(1).values.clamp(min=0)
    found = torch.where(places >= 0, shares.gather(1, places.clamp(min=0).long()), 0.0).sort(1).values
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for head, numbers in enumerate(places.tolist()):
        chosen = [number for number in numbers if number >= 0]
        assert len(set(chosen)) == len(chosen) == min(COUNT, int((shares[head] >= 0).sum()))
        assert all(shares[head, number] >= 0 for number in chosen)


def test_guests_that_are_recalled_again_stay(device: str) -> None:
    shares = draw(device, 1024, 1000)
    best = shares.topk(COUNT).indices
    guests = no_guests(device)
    guests[:, 2:6] = best[:, 5:9].int()  # stay
    guests[:, 8] = shares.argmin(1).int()  # leaves
    places = select(shares, guests)
    assert (places[:, 2:6] == int(STAYS)).all()
    after = torch.where(places == int(STAYS), guests, places)
    assert torch.equal(after.sort(1).values, best.int().sort(1).values)


def test_what_is_not_replaced_is_empty(device: str) -> None:
    shares = draw(device, 1024, 6)
    guests = torch.arange(COUNT, dtype=torch.int32, device=device).expand(HEADS, -1).contiguous()
    places = select(shares, guests)
    after = torch.where(places == int(STAYS), guests, places)
    for numbers in after.tolist():
        assert sorted(number for number in numbers if number >= 0) == [0, 1, 2, 4, 5]


def test_padding_changes_nothing(device: str) -> None:
    shares = draw(device, 1024, 0)
    assert (select(shares, no_guests(device), position=-1) == int(STAYS)).all()


def test_a_number_of_guests_that_is_no_power_of_two(device: str) -> None:
    shares = draw(device, 1024, 1024)
    places = select(shares, no_guests(device, 9))
    assert torch.equal(places.sort(1).values, shares.topk(9).indices.int().sort(1).values)
