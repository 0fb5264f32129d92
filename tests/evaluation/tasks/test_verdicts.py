from __future__ import annotations

import pytest

from msrnn.evaluation.tasks.verdicts import LOSS, TIE, UNREADABLE, WIN, choice, leaning, verdict


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("(A)", "A"),
        ("B", "B"),
        (" c.\n", None),
        ("C.", "C"),
        ("Response (B) is better.", "B"),
        ("**(A)**", "A"),
        ("Response A is better", "A"),
        ("A is more coherent", "A"),
        ("B: it has more characters", "B"),
        ("(C) equal quality", "C"),
        ("Both are of equal quality", "C"),
        ("Response (A) and Response (B) are equally good", "C"),
        ("(A) or (B)", None),
        ("A better plot is in the second one", None),
        ("I cannot decide", None),
        ("", None),
    ],
)
def test_what_an_answer_means(answer: str, expected: str | None) -> None:
    assert choice(answer) == expected


def test_a_win_only_if_both_agree() -> None:
    outcomes = {("A", "B"): WIN, ("B", "A"): LOSS, ("A", "A"): TIE, ("B", "B"): TIE, ("C", "C"): TIE, ("A", "C"): TIE}
    assert {given: verdict(*given) for given in outcomes} == outcomes
    assert verdict(None, "A") == verdict("A", None) == UNREADABLE


def test_what_speaks_for_a_letter_cancels() -> None:
    """A judge that likes (A) whatever it stands for, and one that likes the bounded model's story a little."""
    assert leaning([-1, -5, -9], [-1, -5, -9]) == 0
    assert leaning([-1, -5, -9], [-1, -4, -9]) == 1
    assert leaning([-2, -5, -9], [-1, -5, -9]) == -1
