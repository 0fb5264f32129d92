from __future__ import annotations

import numpy
import pytest
from numpy.testing import assert_allclose

import msrnn
from msrnn.analysis.study import ALL, PAPER_SIZES, PAPER_TAGS
from msrnn.analysis.summary import (
    agreement,
    between_rows,
    count_seen_by_both,
    coverage,
    off_diagonal,
    over_all_steps,
    overlap,
    recent,
    steps_kept,
    summarize,
    survivors,
    window,
)
from tests.helpers.handmade import HEADS, LENGTH, PLAIN, SINK, SIZE, WINDOW
from tests.helpers.tiny import build, llama, tokens

A, B = numpy.array(WINDOW), numpy.array(SINK)


def mask(evicted_at: numpy.ndarray) -> numpy.ndarray:
    """The definition: [steps, tokens]."""
    t, j = numpy.ogrid[: len(evicted_at), : len(evicted_at)]
    return (j <= t) & (t <= evicted_at)


def test_steps_kept() -> None:
    assert steps_kept(A).tolist() == [3, 3, 3, 3, 3, 3, 2, 1]
    assert steps_kept(B).tolist() == [8, 2, 2, 2, 2, 2, 2, 1]
    assert steps_kept(A).tolist() == mask(A).sum(0).tolist()


def test_a_window_is_a_window() -> None:
    assert window(LENGTH, SIZE).tolist() == WINDOW
    assert recent(A, SIZE) == 1


def test_recent_is_what_a_window_sees_as_well() -> None:
    # From step 3 on, layer 1 sees token 0 and the two newest: the window sees those two.
    assert recent(B, SIZE) == pytest.approx(2 / 3)
    assert over_all_steps(recent(B, SIZE), SIZE, LENGTH) == pytest.approx((3 * 1 + 5 * 2 / 3) / 8)
    assert numpy.isnan(recent(A, LENGTH))
    assert over_all_steps(recent(A, LENGTH), LENGTH, LENGTH) == 1


def test_overlap_by_the_definition() -> None:
    for start in (0, 3, 7):
        both = (mask(A) & mask(B))[start:].sum()
        assert count_seen_by_both(A, B, start) == both
        assert overlap(A, B, start) == pytest.approx(2 * both / (mask(A)[start:].sum() + mask(B)[start:].sum()))
    assert_allclose(between_rows(numpy.stack([A, B, A]), 3), [[1, 2 / 3, 1], [2 / 3, 1, 2 / 3], [1, 2 / 3, 1]])
    assert_allclose(off_diagonal(between_rows(numpy.stack([A, B, A]), 3)), [5 / 6, 2 / 3, 5 / 6])
    assert numpy.isnan(off_diagonal(numpy.ones((1, 1)))).all()


def test_survivors_count_only_those_who_could_be() -> None:
    did, could = survivors(steps_kept(A))
    assert did.tolist() == [8, 7, 6, 0, 0, 0, 0, 0]  # of eight, six reach the third step: all that could
    assert could.tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    did, _ = survivors(steps_kept(numpy.stack([A, B])))
    assert did.tolist() == [16, 14, 7, 1, 1, 1, 1, 1]


def test_coverage_is_the_mask_in_coarser_pixels() -> None:
    assert (coverage(A, 100) == mask(A)).all()
    fine = mask(B).astype(float)
    assert_allclose(coverage(B, 4), fine.reshape(4, 2, 4, 2).mean((1, 3)))
    cuts = ((0, 2), (2, 5), (5, 8))  # pixels of two, three and three of eight
    assert_allclose(coverage(B, 3), [[fine[a:b, c:d].mean() for c, d in cuts] for a, b in cuts])


@pytest.mark.parametrize(("size", "mean"), list(zip(PAPER_SIZES, PAPER_TAGS[ALL], strict=True)))
def test_the_mean_of_all_tokens_is_the_papers(size: int, mean: int) -> None:
    """It depends only on size and length, so the paper counts steps in the same way."""
    assert round(steps_kept(window(4096, size)).mean()) == mean


@pytest.mark.parametrize("policy", ["window", "tova", "h2o-layer"])
def test_any_policy_has_the_same_mean(policy: str) -> None:
    times = msrnn.trace(msrnn.MultiStateRNN(build(llama()), policy, 8), tokens(1, 40)).evicted_at[0, :, 0].numpy()
    assert steps_kept(times).mean(-1).tolist() == [steps_kept(window(40, 8)).mean()] * 2
    assert recent(times, 8) == pytest.approx([1, 1]) if policy == "window" else (recent(times, 8) < 1).all()


def test_a_summary() -> None:
    one = summarize("tova", SIZE, PLAIN)
    assert one.life.tolist() == [[3, 3, 3, 3, 3, 3, 2, 1], [8, 2, 2, 2, 2, 2, 2, 1]]
    assert one.first(3).tolist() == [5.5, 2.5, 2.5]
    assert_allclose(one.recent, [[5 / 6], [5 / 6]])  # all of one chunk, two thirds of the other
    assert one.recent_at_all_steps == pytest.approx((1 + (3 + 5 * 2 / 3) / 8) / 2)
    assert one.held == pytest.approx((2 + 2) / 16)  # tokens 6 and 7; tokens 0 and 7
    assert one.counts.tolist() == [0, 4, 14, 12, 0, 0, 0, 0, 2]
    assert [one.quantile(q) for q in (0.1, 0.5, 0.9, 0.99)] == [1, 2, 3, 8]
    assert_allclose(one.survival, [1, 1, 7 / 12, 1 / 10, 1 / 8, 1 / 6, 1 / 4, 1 / 2])
    assert_allclose(one.between_layers, numpy.ones((2, 2)))
    assert numpy.isnan(one.between_heads).all()


def test_heads_that_differ() -> None:
    one = summarize("h2o", SIZE, HEADS)
    assert_allclose(one.recent, [[1.0, 2 / 3], [1.0, 1.0]])
    assert_allclose(one.between_heads, [[2 / 3, 2 / 3], [1.0, 1.0]])
    assert_allclose(one.between_layers, [[1, 5 / 6], [5 / 6, 1]])


def test_policies_that_agree_and_that_do_not() -> None:
    assert agreement(PLAIN, PLAIN) == 1
    assert agreement(PLAIN[:1], PLAIN[1:]) == pytest.approx(2 / 3)
    # Layer 0 of the first chunk: a window against a window and a sink.
    assert agreement(PLAIN[:1], HEADS[:1]) == pytest.approx((5 / 6 + 1) / 2)
