from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends.numba.scan import scan_numba
from msrnn.backends.torch import scan_torch
from msrnn.bound import Bound
from msrnn.core.slots import HELD
from msrnn.policy import Policy
from tests.helpers.scans import arguments
from tests.helpers.weights import scan_by_weights

Scan = Callable[..., Tensor]
every = pytest.mark.parametrize("scan", [scan_numba, scan_torch, scan_by_weights])
gives_attention = pytest.mark.parametrize("scan", [scan_numba, scan_torch])


def chunk(scores: list[list[float]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One head reading C new tokens into no slots at all."""
    count = len(scores)
    position = torch.arange(count, dtype=torch.int32).view(1, 1, count)
    return (
        torch.tensor(scores, dtype=torch.float32).view(1, 1, 1, count, count),
        position,
        torch.zeros(1, 1, count),
        position[0].clone(),
    )


@every
def test_the_least_attended_leaves(scan: Scan) -> None:
    evicted = scan(*chunk([[0, 0, 0], [0, 0, 0], [2, 1, 3]]), Bound(Policy.parse("tova"), 2))
    assert evicted.tolist() == [[[HELD, 2, HELD]]]


@every
def test_ties_go_to_the_older_wherever_they_lie(scan: Scan) -> None:
    scores, position, importance, query = chunk([[0, 0, 0]] * 3)
    evicted = scan(scores, position, importance, query, Bound(Policy.parse("tova"), 2))
    assert evicted.tolist() == [[[2, HELD, HELD]]]
    # The same three tokens, the two older ones lying in slots in the other order.
    swapped = torch.tensor([[[1, 0, 2]]], dtype=torch.int32)
    evicted = scan(
        torch.zeros(1, 1, 1, 1, 3),
        swapped,
        torch.zeros(1, 1, 3),
        torch.tensor([[2]], dtype=torch.int32),
        Bound(Policy.parse("tova"), 2),
    )
    assert evicted.tolist() == [[[HELD, 2, HELD]]]


@every
def test_the_newest_may_leave_at_once(scan: Scan) -> None:
    evicted = scan(*chunk([[0, 0], [5, -5]]), Bound(Policy.parse("tova"), 1))
    assert evicted.tolist() == [[[HELD, 1]]]


@every
def test_importance_decays(scan: Scan) -> None:
    rows = [[0.0, 0, 0], [4.0, 0, 0], [0.0, 1, 2]]
    by_sum = scan(*chunk(rows), Bound(Policy(1.0), 2))
    by_last = scan(*chunk(rows), Bound(Policy(0.0), 2))
    assert by_sum.tolist() == [[[HELD, 2, HELD]]]
    assert by_last.tolist() == [[[2, HELD, HELD]]]


@every
def test_a_small_value_makes_attention_count_for_little(scan: Scan) -> None:
    rows = [[0.0, 0, 0], [0.0, 0, 0], [2.0, 1, 3]]
    norm = torch.tensor([[[0.1, 1.0, 1.0]]])
    assert scan(*chunk(rows), Bound(Policy(0.0, value_norm=True), 2), row_weight=norm).tolist() == [[[2, HELD, HELD]]]


@gives_attention
def test_scores_become_attention_over_what_is_seen(scan: Scan) -> None:
    scores, *rest = chunk([[1, 9, 9], [1, 2, 9], [1, 2, 3]])
    scan(scores, *rest, Bound(Policy.parse("window"), 1))
    one = torch.tensor([1.0, 2.0]).softmax(0).tolist()
    two = torch.tensor([2.0, 3.0]).softmax(0).tolist()
    expected = torch.tensor([[1.0, 0.0, 0.0], [*one, 0.0], [0.0, *two]])
    torch.testing.assert_close(scores[0, 0, 0], expected)


@gives_attention
def test_a_state_that_left_cannot_drown_those_that_stay(scan: Scan) -> None:
    """Scores 200 below one that is gone would vanish, had the exponentials been taken relative to it."""
    scores, *rest = chunk([[0, 0, 0], [0, 0, 0], [500, 1, 2]])
    scan(scores, *rest, Bound(Policy.parse("window"), 1))
    expected = torch.tensor([0.0, *torch.tensor([1.0, 2.0]).softmax(0).tolist()])
    torch.testing.assert_close(scores[0, 0, 0, 2], expected)


@gives_attention
def test_sinks_take_part_and_are_no_states(scan: Scan) -> None:
    scores, *rest = chunk([[0, 0], [0, 1]])
    scan(scores, *rest, Bound(Policy.parse("tova"), 4), sinks=torch.full((1, 1, 1, 2), 2.0))
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)[:2]
    torch.testing.assert_close(scores[0, 0, 0, 1], expected)


@pytest.mark.parametrize("number", [math.nan, -math.nan], ids=["nan", "-nan"])
@pytest.mark.parametrize("kernel", [scan_torch, scan_numba, scan_by_weights])
def test_an_importance_that_is_nan_counts_as_infinity(kernel: Any, number: float, device: str) -> None:
    """The bits of a NaN with a sign are those of a negative integer, which would sort below every importance."""
    if kernel is scan_numba and device != "cpu":
        pytest.skip("this one runs on a CPU")
    case = {"heads": 2, "new": 2, "held": 4, "padding": 0, "sinks": False, "seed": 5}
    given = arguments({**case, "bound": Bound(Policy(1.0), 4)}, device)
    position, importance = given[1], given[2]
    importance[(position == 0) | (position == 1)] = number
    evicted_at = kernel(*given)
    assert (evicted_at[(position == 0) | (position == 1)] == HELD).all()
    assert ((position >= 0) & (evicted_at == HELD)).sum(-1).eq(4).all()
