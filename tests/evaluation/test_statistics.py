from __future__ import annotations

import math

import pytest

from msrnn.evaluation.statistics import difference, mean, perplexity


def test_every_token_counts_the_same() -> None:
    assert mean([10.0, 90.0], [10, 30]).value == pytest.approx(2.5)
    assert perplexity([math.log(8) * 4], [4]) == (pytest.approx(8.0), None, None)


def test_texts_that_agree_leave_no_doubt() -> None:
    assert mean([6.0] * 5, [3] * 5) == (2.0, 2.0, 2.0)
    assert perplexity([math.log(2)] * 5, [1] * 5) == pytest.approx((2.0, 2.0, 2.0))


def test_an_interval_of_two_texts_reaches_from_one_to_the_other() -> None:
    # Of two texts, a quarter of the draws takes the first twice and a quarter the second.
    assert mean([0.0, 4.0], [1, 1]) == (2.0, 0.0, 4.0)


def test_an_interval_is_about_two_standard_errors_to_each_side() -> None:
    sums, error = [i / 399 for i in range(400)], 12**-0.5 / 20
    found = mean(sums, [1] * 400)
    assert found.value == pytest.approx(0.5)
    assert found.low == pytest.approx(0.5 - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(0.5 + 1.96 * error, abs=0.2 * error)
    assert found == mean(sums, [1] * 400)
    assert found != mean(sums, [1] * 400, seed=1)


def test_pairs_are_surer_than_their_parts() -> None:
    easy_to_hard = [10.0 * i for i in range(1, 21)]
    worse = [x + math.log(1.5) * 5 for x in easy_to_hard]
    found = difference(worse, easy_to_hard, [5] * 20)
    assert found == pytest.approx((math.log(1.5),) * 3)
    assert found.exp() == pytest.approx((1.5,) * 3)
    low, high = mean(worse, [5] * 20).low, mean(easy_to_hard, [5] * 20).high
    assert low is not None
    assert high is not None
    assert low < high
    back = difference(easy_to_hard, worse, [5] * 20)
    assert back.exp().value == pytest.approx(1 / 1.5)


def test_no_texts_and_unequal_ones_are_refused() -> None:
    for sums, counts in (([], []), ([1.0], [1, 2])):
        with pytest.raises(ValueError, match="texts"):
            mean(sums, counts)
    with pytest.raises(ValueError, match="zip"):
        difference([1.0], [1.0, 2.0], [1])
