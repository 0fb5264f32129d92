"""Slots whose archives kernels use: the table has the addresses of all segments, and there is always room ahead."""

from __future__ import annotations

from dataclasses import replace

import torch

from msrnn.core.archive import SEGMENT
from msrnn.core.paged_slots import LEAST_SEGMENTS, PagedSlots
from msrnn.core.slots import LayerShape
from msrnn.policy import Bound, Policy
from msrnn.recall import Recall

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
