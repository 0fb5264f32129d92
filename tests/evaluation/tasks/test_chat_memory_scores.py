from __future__ import annotations

import pytest

from msrnn.errors import UsageError
from msrnn.evaluation.data.conversations import NOT_MENTIONED
from msrnn.evaluation.tasks.chat_memory_scores import check_stemmer, find_choice, score_answer, stem_words

pytest.importorskip("nltk")
CHOICES = ("a boat", NOT_MENTIONED)


def test_words_are_stemmed_without_articles_and_punctuation() -> None:
    assert stem_words("The dancers, and a dancing-school's band!") == ["dancer", "dancingschool", "band"]
    assert stem_words("painting Painted paints") == ["paint"] * 3


@pytest.mark.parametrize(
    ("category", "answer", "expected", "score"),
    [
        (4, "She was painting", "painted", 0.5),
        (4, "the boat", "a boat", 1),
        (4, "", "boat", 0),
        (4, "the", "the", 0),
        (2, "8 May, 2023", "7 May 2023", 2 / 3),
        (2, "boat boat", "boat", 2 / 3),
        # Parts of a list in any order; one of two is half, and a part counts by its best match.
        (1, "a cat, a boat", "a boat, a cat", 1),
        (1, "a boat", "a boat, a cat", 0.5),
        (1, "boats and cats", "a boat, a cat", 2 / 3),
        # A comma separates nothing in the other categories.
        (4, "cat, boat", "boat", 2 / 3),
        (3, "yes", "Yes; she likes it", 1),
        (4, "yes", "Yes; she likes it", 2 / 5),
    ],
)
def test_scores(category: int, answer: str, expected: str, score: float) -> None:
    assert score_answer(category, answer, expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("(b)", 1),
        ("b", 1),
        ("B.", 1),
        ("(b) Not mentioned in the conversation", 1),
        ("It is not mentioned.", 1),
        ("No information available", 1),
        ("(a)", 0),
        ("a", 0),
        ("A boat", 0),
        ("boat", 0),
        ("", 0),
    ],
)
def test_adversarial_answers(answer: str, score: float) -> None:
    assert score_answer(5, answer, NOT_MENTIONED, CHOICES) == score


def test_the_choice_that_an_answer_names() -> None:
    assert find_choice(" (A) or (b)", CHOICES) == "a boat"
    assert find_choice("a boat of mine", CHOICES) == "a boat of mine"
    assert find_choice("b", ()) == "b"


def test_without_a_stemmer(monkeypatch: pytest.MonkeyPatch) -> None:
    check_stemmer()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="nltk"):
        check_stemmer()
