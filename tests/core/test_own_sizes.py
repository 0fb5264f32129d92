from __future__ import annotations

from typing import Any

import pytest
import torch

from msrnn.bound import Bound, layer_bound
from msrnn.core.own_sizes import (
    check_own_size,
    find_limits,
    group_by_fewer,
    join_fewer,
    lower_bound,
    make_fewer,
    no_fewer,
    split_sizes,
)
from msrnn.errors import UsageError
from msrnn.policy import Policy

TOVA, HALF = Bound(Policy.parse("tova"), 20), Bound(Policy(0.5, recent=0.5), 20)
WINDOW = Bound(Policy.parse("window"), 8, sliding=True)  # a sliding layer that holds its whole window
SLIDING = Bound(Policy.parse("tova"), 20, 50, sliding=True)  # one that does not


def test_numbers_are_differences_to_the_bound() -> None:
    assert make_fewer(HALF, [None, 20, 9, 4]).tolist() == [[0, 0], [0, 0], [11, 6], [16, 8]]
    assert make_fewer(WINDOW, [None, 10]).tolist() == [[0, 0], [0, 0]]
    size, recent = find_limits(HALF, make_fewer(HALF, [None, 9]))
    assert isinstance(size, torch.Tensor)
    assert isinstance(recent, torch.Tensor)
    assert (size.flatten().tolist(), recent.flatten().tolist()) == ([20, 9], [10, 4])
    assert find_limits(HALF, None) == (20, 10)
    assert no_fewer(2, torch.device("cpu")).tolist() == [[0, 0], [0, 0]]


def test_a_lower_bound_is_that_of_a_model_of_the_size() -> None:
    for bound, window in ((TOVA, None), (SLIDING, 50), (WINDOW, 9)):
        assert lower_bound(bound, 12) == layer_bound(TOVA.policy, 12, window)


@pytest.mark.parametrize("bounds", [[TOVA], [TOVA, WINDOW], [SLIDING, WINDOW, SLIDING], [HALF, HALF]], ids=str)
def test_a_file_has_one_size_for_all_layers(bounds: list[Bound]) -> None:
    own = [None, 12, None, 10]
    layers = [make_fewer(bound, own) for bound in bounds]
    sizes = join_fewer(bounds, layers)
    assert sizes is not None
    assert sizes.tolist() == [0, 12, 0, 10]
    assert all(torch.equal(*pair) for pair in zip(split_sizes(bounds, sizes), layers, strict=True))
    assert group_by_fewer(layers) == {0: [0, 2], 8: [1], 10: [3]}
    assert join_fewer(bounds, [make_fewer(bound, [None]) for bound in bounds]) is None


def test_layers_without_a_bound_have_no_numbers() -> None:
    assert join_fewer([], []) is None
    with pytest.raises(UsageError, match="not one size"):
        split_sizes([None, TOVA], torch.tensor([5], dtype=torch.int32))


@pytest.mark.parametrize(
    ("bounds", "size", "message"),
    [
        ([TOVA], 21, "at most 20"),
        ([TOVA], 0, "at least 1"),
        ([TOVA], -3, "at least 1"),
        ([Bound(Policy.parse("window+4"), 20)], 4, "at least 5"),
        ([Bound(Policy(0.5, recent=3, first=2), 20)], 5, "at least 6"),
        ([TOVA, WINDOW], 7, "at least 8"),
        ([TOVA, Bound(TOVA.policy, 10)], 5, "not one size"),
        ([TOVA, None], 5, "not one size"),
        ([WINDOW], 5, "not one size"),
        ([None], 5, "not one size"),
    ],
)
def test_what_a_model_of_the_size_would_not_be_is_refused(bounds: list[Any], size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_own_size(bounds, size)


@pytest.mark.parametrize(("bounds", "size"), [([TOVA], 20), ([TOVA], 1), ([TOVA, WINDOW], 8), ([HALF], 1)])
def test_other_sizes_are_taken(bounds: list[Any], size: int) -> None:
    check_own_size(bounds, size)
