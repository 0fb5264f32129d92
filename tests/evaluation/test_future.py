"""Evictions by the true future, against loops that follow the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from msrnn.core.change import AHEAD
from msrnn.core.scores import Scoring
from msrnn.errors import UsageError
from msrnn.evaluation.future import Future, attend, find_evictions, find_visible, rank_rows, sum_heads
from tests.helpers.future_by_hand import change_of_queries, evict_slowly, mask_of

T = 24


def whole_changes(length: int = T, most: int = 4) -> Tensor:
    """Small whole numbers: sums are exact, and many are equal."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, most, (2, length, length), generator=generator).tril().float()


@pytest.mark.parametrize("recent", [0, 2])
@pytest.mark.parametrize("ahead", [1, 5, 8, T - 1, 64, None])
@pytest.mark.parametrize("size", [3, 7, T - 1, T, T + 1])
def test_evictions_are_those_of_the_definition(size: int, ahead: int | None, recent: int, device: str) -> None:
    changes = whole_changes()
    found = find_evictions(rank_rows(changes.to(device), ahead), Future(size, ahead, recent))
    assert found.tolist() == [evict_slowly(one, size, ahead, recent) for one in changes]
    assert (found < T).sum(1).tolist() == [max(0, T - size)] * 2


def test_a_single_row_may_be_the_new_one() -> None:
    changes = torch.zeros(1, 4, 4)
    changes[0, :, 0] = 1
    assert find_evictions(rank_rows(changes, None), Future(1)).tolist() == [[3, 1, 2, 4]], "no query after the last"


@pytest.mark.parametrize("ahead", [1, 2, 3, 6, 7, 40, 64, 99, 100, None])
def test_ranks_are_sums_over_the_next_queries(ahead: int | None) -> None:
    changes = whole_changes(100)
    expected = torch.zeros_like(changes)
    for t in range(100):
        expected[:, t] = changes[:, t + 1 : None if ahead is None else t + 1 + ahead].sum(1)
    assert torch.equal(rank_rows(changes, ahead), expected)


def test_small_ranks_survive_large_changes_before_them() -> None:
    changes = torch.full((1, 200, 1), 1e-6)
    changes[:, :100] = 1e6
    assert rank_rows(changes, 64)[0, 110, 0].item() == pytest.approx(64e-6, rel=1e-5)


@pytest.mark.parametrize("size", [1, 5, T])
def test_a_query_sees_one_row_more_than_the_size_and_evicted_rows_stay_away(size: int) -> None:
    ranks = rank_rows(torch.rand(2, T, T, generator=torch.Generator().manual_seed(1)).tril(), AHEAD)
    evicted_at = find_evictions(ranks, Future(size))
    visible = find_visible(evicted_at)
    assert torch.equal(visible.sum(-1), torch.arange(1, T + 1).clamp(max=size + 1).expand(2, -1))
    assert bool(visible.diagonal(dim1=1, dim2=2).all()), "a token sees itself"
    before, after = visible[:, :-1], visible[:, 1:].clone()
    after.diagonal(1, 1, 2).fill_(False)
    assert not bool((after & ~before).any())
    for row, times in enumerate(evicted_at.tolist()):
        assert torch.equal(visible[row], mask_of(times) == 0)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_a_layer(kv_heads: int) -> None:
    """Changes and outputs, with query heads that share KV heads."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, T, 8), torch.randn(2, kv_heads, T, 8), torch.randn(2, kv_heads, T, 5)
    scoring, future = Scoring(0.7), Future(6, ahead=9)
    keys, values = (x.repeat_interleave(6 // kv_heads, 1) for x in (key, value))
    scores = 0.7 * query @ keys.mT
    attention = (scores + mask_of([T] * T)).softmax(-1)
    changes = torch.stack([change_of_queries(a, v) for a, v in zip(attention, values, strict=True)])
    found = sum_heads(query, key, value, scoring).double()[:, 1:]  # query 0 is in nobody's future
    torch.testing.assert_close(found, changes[:, 1:], rtol=1e-4, atol=1e-4)
    output, evicted_at = attend(query, key, value, scoring, future)
    expected = [evict_slowly(one, 6, 9) for one in changes]
    assert evicted_at.tolist() == expected
    masks = torch.stack([mask_of(times) for times in expected])[:, None]
    torch.testing.assert_close(output, ((scores + masks).softmax(-1) @ values).transpose(1, 2))


@pytest.mark.parametrize("size", [T, T + 9])
def test_enough_rows_are_causal_attention(size: int) -> None:
    query, key, value = torch.randn(3, 1, 2, T, 8).unbind(0)
    output, evicted_at = attend(query, key, value, Scoring(1.0), Future(size))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
    torch.testing.assert_close(output.transpose(1, 2), expected)
    assert evicted_at.unique().tolist() == [T]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "size=0: must be a whole number of KV rows, 1 or more"),
        ({"size": "8:upper"}, "size='8:upper': must be a whole number"),
        ({"size": 8, "ahead": 0}, "ahead=0: must be a whole number of steps"),
        ({"size": 8, "recent": 8}, "recent=8: must be a whole number of KV rows, from 0 to 7"),
    ],
)
def test_numbers_that_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Future(**fields)
