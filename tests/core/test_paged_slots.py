"""Slots whose archives kernels use: the table has the addresses of all segments, and there is always room ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from msrnn.bound import Bound
from msrnn.core.paged_slots import LEAST_SEGMENTS, PagedSlots
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.shards import Shards
from msrnn.core.slots import LayerShape
from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.recall import SEGMENT, Recall
from tests.helpers.shards import run_in_turns

SHAPE = LayerShape(4, 2, 8, 8, torch.float32, torch.device("cpu"), paged=True)
BOUND = Bound(Policy.parse("tova"), 16, recall=Recall(16))


def check_table(slots: PagedSlots) -> None:
    for row, archive in zip(slots.table, slots.archives, strict=True):
        addresses = archive.addresses()
        assert row[: len(addresses)].tolist() == addresses


def test_there_is_room_before_a_forward_pass() -> None:
    slots = PagedSlots(2, SHAPE, BOUND)
    assert slots.segments == LEAST_SEGMENTS
    for columns in (5, SEGMENT, 1, 10 * SEGMENT):
        slots.begin_read(columns)
        slots.advance(columns, None)
        check_table(slots)
        assert all(archive.capacity >= slots.seen.max() for archive in slots.archives)
    assert slots.segments == 16
    slots.settle()
    assert [archive.end for archive in slots.archives] == slots.seen.tolist() == [11 * SEGMENT + 6] * 2


def test_padding_takes_no_room() -> None:
    slots = PagedSlots(2, SHAPE, BOUND)
    for columns, reads in ((1, 3 * SEGMENT), (2 * SEGMENT, 9)):
        real = torch.tensor([[True], [False]]).expand(2, columns)
        for _ in range(reads):
            slots.begin_read(columns)
            slots.advance(columns, real)
        check_table(slots)
        assert slots.archives[0].capacity >= slots.seen[0]
        assert slots.archives[1].segment_count * SEGMENT <= 6 * columns + SEGMENT


def test_forks_get_segments_of_their_own_before_they_are_written() -> None:
    slots = PagedSlots(1, SHAPE, BOUND)
    slots.begin_read(SEGMENT + 5)
    slots.advance(SEGMENT + 5, None)
    fork = slots.select(torch.tensor([0]))
    assert torch.equal(fork.table, slots.table)
    fork.begin_read(1)
    check_table(fork)
    assert fork.table[0, 0].tolist() == slots.table[0, 0].tolist()
    assert fork.table[0, 1, 0] != slots.table[0, 1, 0]
    check_table(slots)


def test_a_file_has_no_addresses() -> None:
    slots = PagedSlots(1, SHAPE, BOUND)
    assert "table" in slots.tensors()
    assert "table" not in slots.saved_tensors
    assert slots.nbytes == PagedSlots.nbytes_of(1, SHAPE, BOUND)
    assert replace(SHAPE, paged=True) == SHAPE


def test_kernels_search_the_archives_of_one_process_and_not_those_of_all() -> None:
    rows = torch.randn(2, 1, 2, SEGMENT + 5, 8)

    def join_and_divide(shards: Shards) -> None:
        slots = PagedSlots(1, replace(SHAPE, shards=shards), BOUND)
        slots.advance(SEGMENT + 5, None)
        slots.archives[0].append(*(rows + shards.rank)[:, 0])
        whole = slots.gather_heads()
        assert type(whole) is RecallSlots
        assert "table" not in whole.tensors()
        own = whole.divide(slots)
        assert type(own) is PagedSlots
        check_table(own)
        assert own.table[0, 0].tolist() != slots.table[0, 0].tolist()
        for name, tensor in own.archives[0].tensors().items():
            assert torch.equal(tensor, slots.archives[0].tensors()[name])
        own.begin_read(1)
        check_table(own)
        whole.archives[0].begin = SEGMENT
        with pytest.raises(UsageError, match="searched by the host"):
            whole.divide(slots)

    run_in_turns(2, join_and_divide)
