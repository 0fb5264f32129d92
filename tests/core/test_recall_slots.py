"""Slots with archives: copies, views and resets take their archives along."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from msrnn.bound import Bound
from msrnn.core.recall_slots import RecallSlots, archive_layout
from msrnn.core.shards import Shards
from msrnn.core.slots import LayerShape
from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.recall import Recall
from tests.helpers.shards import run_in_turns

SHAPE = LayerShape(4, 2, 8, 8, torch.float32, torch.device("cpu"))
BOUND = Bound(Policy.parse("tova"), 16, recall=Recall(4))


def filled(batch: int = 2) -> RecallSlots:
    slots = RecallSlots(batch, SHAPE, BOUND)
    rows = torch.randn(2, batch, 2, 10, 8)
    real = torch.ones(batch, 10, dtype=torch.bool)
    real[-1, :3] = False
    slots.archive(rows[0], rows[1], real)
    return slots


def ends(slots: RecallSlots) -> list[int]:
    return [archive.end for archive in slots.archives]


def test_padding_is_not_archived() -> None:
    assert ends(filled()) == [10, 7]


def test_copies_have_archives_of_their_own_and_views_the_same() -> None:
    slots = filled()
    for other in (slots.select(torch.tensor([1, 1])), slots.copy(slice(1, 2)), slots.to(torch.device("cpu"))):
        assert ends(other)[-1] == 7
        assert all(archive not in slots.archives for archive in other.archives)
    view = slots.view(slice(1, 2))
    view.archive(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), None)
    assert ends(slots) == [10, 12]
    assert ends(slots.cat([slots, view], 10)) == [10, 12, 12]
    slots.reorder(torch.tensor([1, 0]))
    assert ends(slots) == [12, 10]
    assert ends(view) == [10]


def test_a_layer_that_shares_buffers_has_empty_archives() -> None:
    slots = filled()
    other = slots.share_buffers()
    other.reset()
    assert other.keys is slots.keys
    assert (ends(other), ends(slots)) == ([0, 0], [10, 7])


def test_a_reset_layer_is_a_new_one() -> None:
    slots = filled()
    slots.set_guests(torch.ones(2, 3, 8), torch.ones(2, 3, 8), torch.ones(2, 3))
    assert (slots.guest_position[0] >= 0).sum() == 6
    slots.reset()
    assert ends(slots) == [0, 0]
    fresh = RecallSlots(2, SHAPE, BOUND)
    assert all(torch.equal(tensor, fresh.tensors()[name]) for name, tensor in slots.tensors().items())
    assert slots.nbytes == RecallSlots.nbytes_of(2, SHAPE, BOUND)


def test_archived_rows_are_as_the_state_keeps_them_or_quantized() -> None:
    quantized = LayerShape(4, 2, 8, 8, torch.float32, torch.device("cpu"), torch.int8)
    assert archive_layout(SHAPE, Recall(4)).code is None
    assert archive_layout(quantized, Recall(4)).code is torch.int8
    assert archive_layout(SHAPE, Recall(4, state_dtype="fp8")).code is torch.float8_e4m3fn


@pytest.mark.parametrize("policy", ["tova", "h2o"])
def test_heads_of_several_processes_are_joined_and_divided(policy: str) -> None:
    bound = replace(BOUND, policy=Policy.parse(policy))
    whole = RecallSlots(2, replace(SHAPE, heads=8, kv_heads=4), bound)
    whole.archive(torch.randn(2, 4, 10, 8), torch.randn(2, 4, 10, 8), None)
    for tensor in whole.tensors().values():
        tensor.copy_(torch.randint(0, 9, tensor.shape))

    def divide_and_join(shards: Shards) -> tuple[RecallSlots, RecallSlots]:
        own = whole.divide(RecallSlots(1, replace(SHAPE, shards=shards), bound))
        own.reserve(1)
        return own, own.gather_heads(archives=shards.rank == 0)

    (own, joined), (other, thrifty) = run_in_turns(2, divide_and_join)
    assert ends(own) == ends(other) == ends(joined) == [10, 10]
    assert ends(thrifty) == [0, 0]
    assert torch.equal(own.guest_keys, whole.guest_keys[:, :2])
    assert torch.equal(other.archives[1].tensors()["keys"], whole.archives[1].tensors()["keys"][2:])
    assert all(torch.equal(tensor, joined.tensors()[name]) for name, tensor in whole.tensors().items())
    assert joined.archived_names == whole.archived_names
    joined.reset()
    joined.archive(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8), None)  # it is a layer with four heads
    assert ends(joined) == [3, 3]


def test_processes_that_have_archived_other_tokens_do_not_wait_for_each_other() -> None:
    def join(shards: Shards) -> None:
        slots = RecallSlots(1, replace(SHAPE, shards=shards), BOUND)
        slots.archive(torch.randn(1, 2, 10 + shards.rank, 8), torch.randn(1, 2, 10 + shards.rank, 8), None)
        with pytest.raises(UsageError, match=r"archived other tokens \(ranks 1 differ"):
            slots.gather_heads()

    run_in_turns(2, join)
