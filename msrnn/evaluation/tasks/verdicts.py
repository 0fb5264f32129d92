"""The meaning of a judge's answers: the choice of one answer, and the verdict of the two answers on a pair."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msrnn.evaluation.cells import Cell

WIN, TIE, LOSS, UNREADABLE = "win", "tie", "loss", "unreadable"
OUTCOMES = (WIN, TIE, LOSS)
_EQUAL = re.compile(r"\b(equal|equally|tie|same quality)\b", re.IGNORECASE)
_FORMS = (
    re.compile(r"\(([ABC])\)"),
    re.compile(r"^\W*([ABC])\W*$"),
    re.compile(r"\b(?:response|option|answer)\s*:?\s*([ABC])\b", re.IGNORECASE),
    re.compile(r"^\W*([ABC])(?:[.:,]|\s+is\b)"),
)

Verdicts = dict[Cell, list[str]]  # of each version's pairs, by seed


def choice(answer: str) -> str | None:
    """A, B or C (equal quality); None where the answer names none, or more than one."""
    for form in _FORMS:
        named: set[str] = {letter.upper() for letter in form.findall(answer.strip())}
        if len(named) == 1:
            return named.pop()
        if named:
            break
    return "C" if _EQUAL.search(answer) else None


def verdict(first: str | None, swapped: str | None) -> str:
    """From the choices where the bounded model's story was (A), and where it was (B). A win needs both."""
    if first is None or swapped is None:
        return UNREADABLE
    return {("A", "B"): WIN, ("B", "A"): LOSS}.get((first, swapped), TIE)


def leaning(first: Sequence[float], swapped: Sequence[float]) -> float:
    """How much likelier the judge prefers the bounded model's story, as a log-ratio over both orders.

    A preference for a letter (A or B) cancels.
    """
    return first[0] - first[1] + swapped[1] - swapped[0]
