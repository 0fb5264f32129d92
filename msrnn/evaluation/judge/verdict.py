"""What a judge's answers mean."""

from __future__ import annotations

import re
from collections.abc import Sequence

WIN, TIE, LOSS, UNREADABLE = "win", "tie", "loss", "unreadable"
LIKELIHOODS = "log_likelihoods"  # of (A), (B) and (C), where a judge tells them
_EQUAL = re.compile(r"\b(equal|equally|tie|same quality)\b", re.IGNORECASE)
_FORMS = (
    re.compile(r"\(([ABC])\)"),
    re.compile(r"^\W*([ABC])\W*$"),
    re.compile(r"\b(?:response|option|answer)\s*:?\s*([ABC])\b", re.IGNORECASE),
    re.compile(r"^\W*([ABC])(?:[.:,]|\s+is\b)"),
)


def choice(answer: str) -> str | None:
    """A, B or C, for equal quality; None where the answer names none, or more than one."""
    for form in _FORMS:
        named: set[str] = {letter.upper() for letter in form.findall(answer.strip())}
        if len(named) == 1:
            return named.pop()
        if named:
            break
    return "C" if _EQUAL.search(answer) else None


def verdict(first: str | None, swapped: str | None) -> str:
    """Of the bounded model: choices where its story was (A), and where it was (B). A win only if both agree."""
    if first is None or swapped is None:
        return UNREADABLE
    return {("A", "B"): WIN, ("B", "A"): LOSS}.get((first, swapped), TIE)


def leaning(first: Sequence[float], swapped: Sequence[float]) -> float:
    """How much likelier a judge was to call the bounded model's story the better one, as logarithms of A and B.

    In both orders together: what speaks for a letter, whatever stands behind it, cancels.
    """
    return first[0] - first[1] + swapped[1] - swapped[0]
