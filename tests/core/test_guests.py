"""Guests: what a search finds, and attention to them alone."""

from __future__ import annotations

import pytest
import torch

from msrnn.bound import Bound
from msrnn.core import guests
from msrnn.core.guests import attend_guests, find_guests, recall
from msrnn.core.quantization import quantize
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape
from msrnn.policy import Policy
from msrnn.recall import Recall

SHAPE = LayerShape(4, 2, 8, 8, torch.float32, torch.device("cpu"))


def slots_of(count: int, **options: object) -> RecallSlots:
    bound = Bound(Policy.parse("tova"), 16, recall=Recall(**{"rows": 4, **options}))  # type: ignore[arg-type]
    slots = RecallSlots(1, SHAPE, bound)
    rows = torch.randn(2, 1, 2, count, 8, generator=torch.Generator().manual_seed(0)) * 0.1
    slots.archive(rows[0], rows[1], None)
    return slots


def plant(slots: RecallSlots, position: int, key: torch.Tensor) -> None:
    """Make an archived key of all heads one that a query of the same direction finds."""
    for begin, keys in slots.archives[0].keys_to_search():
        if begin <= position < begin + keys.codes.shape[1]:
            copy = quantize(key, torch.int8 if keys.scale is not None else None)
            keys.codes[:, position - begin] = copy.codes
            if keys.scale is not None and copy.scale is not None:
                keys.scale[:, position - begin] = copy.scale


QUERY = torch.eye(8)[:1] * 3


@pytest.mark.parametrize("at_once", [guests.SCORES, 1])
@pytest.mark.parametrize("search", ["exact", "int8"])
def test_the_search_finds_the_token_that_a_query_asks_for(
    search: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "SCORES", at_once)
    slots = slots_of(1500, search=search)
    plant(slots, 7, QUERY[0] * 5)
    plant(slots, 1300, QUERY[0] * 4)
    query, key = QUERY.expand(2, 2, 1, 8), torch.zeros(2, 1, 8)
    found = find_guests(slots, query, key, 1500, Scoring(1.0))
    assert found.shape == (2, 4)
    assert all({7, 1300} <= set(head) for head in found.tolist())
    slots.position[0, 0, 3] = 7  # held: it is no guest
    again = find_guests(slots, query, key, 1500, Scoring(1.0))
    assert all(1300 in head and 7 not in head for head in again.tolist())


def test_a_block_finds_what_any_of_its_queries_asks_for() -> None:
    slots = slots_of(300)
    for number in range(3):
        plant(slots, 50 + number, torch.eye(8)[number] * 9)
    query = (torch.eye(8)[:3] * 3).expand(2, 2, 3, 8)
    found = find_guests(slots, query, torch.zeros(2, 3, 8), 300, Scoring(1.0))
    assert all({50, 51, 52} <= set(head) for head in found.tolist())


def test_an_empty_archive_has_no_guests() -> None:
    slots = slots_of(0)
    slots.guest_position.fill_(3)
    recall(slots, torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8), 0, Scoring(1.0))
    assert bool((slots.guest_position == -1).all())
    attended = attend_guests(slots, torch.randn(1, 4, 1, 8), torch.zeros(1, 1, dtype=torch.int32), Scoring(1.0))
    assert bool((attended.log_sum == -torch.inf).all())
    assert bool((attended.output == 0).all())
