from __future__ import annotations

import pytest
import torch

from msrnn.bound import Bound
from msrnn.core.protection import (
    RANGES,
    add_ranges,
    check_fits,
    count_protected,
    count_room,
    forget_unread,
    hide_protected,
    no_ranges,
)
from msrnn.policy import Policy

CPU = torch.device("cpu")


def ranges_of(*pairs: tuple[int, int]) -> torch.Tensor:
    ranges = no_ranges(1, CPU)
    ranges[0, : len(pairs)] = torch.tensor(pairs, dtype=torch.int32)
    return ranges


def add(ranges: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return add_ranges(ranges, torch.tensor([begin]), torch.tensor([end]))


def test_protected_positions_look_like_empty_slots() -> None:
    position = torch.tensor([[[5, -1, 0, 3, 4, 9]]], dtype=torch.int32)
    assert hide_protected(position, ranges_of((3, 5), (9, 10))).tolist() == [[[5, -1, 0, -1, -1, -1]]]
    assert hide_protected(position, None) is position
    assert torch.equal(hide_protected(position, no_ranges(1, CPU)), position)


def test_each_sequence_has_its_own_ranges() -> None:
    position = torch.tensor([[[0, 1, 2]], [[0, 1, 2]]], dtype=torch.int32)
    ranges = torch.cat([ranges_of((0, 1)), ranges_of((2, 3))])
    assert hide_protected(position, ranges).tolist() == [[[-1, 1, 2]], [[0, 1, -1]]]


def test_the_first_tokens_are_counted_once() -> None:
    assert count_protected(ranges_of((0, 6), (10, 12)), first=0).tolist() == [8]
    assert count_protected(ranges_of((0, 6), (10, 12)), first=4).tolist() == [4]
    assert count_protected(ranges_of((0, 2)), first=4).tolist() == [0]


def test_a_range_that_follows_another_extends_it() -> None:
    ranges = add(add(no_ranges(1, CPU), 3, 5), 5, 9)
    assert ranges[0].tolist() == [[3, 9], *[[0, 0]] * (RANGES - 1)]
    assert torch.equal(add(ranges, 20, 20), ranges), "no token, no range"


def test_tokens_that_were_not_read_are_not_protected() -> None:
    seen = torch.tensor([12])
    assert forget_unread(ranges_of((3, 5), (10, 20), (12, 15)), seen)[0].tolist() == [[3, 5], [10, 12], [0, 0], [0, 0]]


def test_only_so_many_ranges_fit() -> None:
    ranges = no_ranges(1, CPU)
    for i in range(RANGES):
        ranges = add(ranges, 10 * i, 10 * i + 5)
    with pytest.raises(ValueError, match=f"at most {RANGES} separate ranges.*release"):
        add(ranges, 100, 101)
    assert add(ranges, 35, 40)[0, -1].tolist() == [30, 40]


def test_the_policy_keeps_a_row_to_choose_from() -> None:
    bound = Bound(Policy(0.0, "layer", 2, 3), 10)  # 2 first, 3 recent, and one: 4 can be protected
    assert count_room(bound) == 4
    check_fits(ranges_of((5, 9)), [bound], torch.tensor([4]))
    with pytest.raises(ValueError, match="5 tokens: 4 fit; of 10 KV rows per layer, the policy needs 6"):
        check_fits(ranges_of((5, 10)), [bound], torch.tensor([5]))
    with pytest.raises(ValueError, match=r"3 tokens: 2 fit.*2 are protected already"):
        check_fits(ranges_of((5, 7), (8, 11)), [bound], torch.tensor([3]))
    check_fits(ranges_of((0, 6)), [bound], torch.tensor([6]))  # the first two are protected anyway


def test_a_sliding_window_that_fits_protects_nothing() -> None:
    check_fits(ranges_of((0, 100)), [Bound(Policy.parse("window"), 7, sliding=True)], torch.tensor([100]))
