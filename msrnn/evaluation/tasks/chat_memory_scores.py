"""Scores of answers about a conversation, as LoCoMo's authors compute them: F1 of stemmed words, from 0 to 1.

Multi-hop answers are lists: each expected part counts by the best part of the answer. Of an open-domain answer, only
the text before the first semicolon is expected. An adversarial answer is right if it says that the conversation has no
such information. The stemmer is the authors': NLTK's Porter stemmer.

One thing differs: an adversarial answer counts as choice (a) or (b) if it begins with this letter, and for the authors
only if it is nothing else.
"""

from __future__ import annotations

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from msrnn.errors import UsageError
from msrnn.evaluation.data.conversations import ADVERSARIAL, MULTI_HOP, OPEN_DOMAIN

ABSENT = ("no information available", "not mentioned")
_CHOICE = re.compile(r"\(([ab])\)|([ab])(?=[).:,]|$)", re.IGNORECASE)
_LEFT_OUT = re.compile(r"\b(a|an|the|and)\b")


def check_stemmer() -> None:
    """Refuse to score where NLTK is not installed."""
    if importlib.util.find_spec("nltk") is None:
        raise UsageError("scores need the package nltk, which is not installed: pip install 'msrnn[eval]'")


def score_answer(category: int, answer: str, expected: str, choices: Sequence[str] = ()) -> float:
    """The score of one answer, by the rules of its category."""
    if category == ADVERSARIAL:
        said = find_choice(answer, choices).lower()
        return float(any(phrase in said for phrase in ABSENT))
    if category == MULTI_HOP:
        return score_parts(answer, expected)
    return word_f1(answer, expected.split(";")[0] if category == OPEN_DOMAIN else expected)


def find_choice(answer: str, choices: Sequence[str]) -> str:
    """The choice that an answer names, or else the answer itself."""
    found = _CHOICE.match(answer.strip())
    if found is None or len(choices) < 2:
        return answer
    return choices["ab".index((found[1] or found[2]).lower())]


def score_parts(answer: str, expected: str) -> float:
    """The mean over the expected parts, which commas separate, of the F1 of the best part of the answer."""
    said, parts = answer.split(","), expected.split(",")
    return sum(max(word_f1(one, part) for one in said) for part in parts) / len(parts)


def word_f1(answer: str, expected: str) -> float:
    """The F1 of stemmed words; a word counts as often as both texts have it."""
    said, true = stem_words(answer), stem_words(expected)
    common = sum((Counter(said) & Counter(true)).values())
    return 2 * common / (len(said) + len(true)) if common else 0.0


def stem_words(text: str) -> list[str]:
    """The stems of a text's words in lower case, without punctuation, articles and "and"."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [_stemmer().stem(word) for word in _LEFT_OUT.sub(" ", bare).split()]


@cache
def _stemmer() -> Any:
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()
