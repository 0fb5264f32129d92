"""Prompts that begin alike, as questions on one document do: what they share has to be read only once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class Family(NamedTuple):
    rows: list[int]
    shared: int  # tokens that all of them begin with, and that none of them ends with


def families(prompts: Sequence[Sequence[int]]) -> list[Family]:
    """Every prompt in one: neighbours in the order of the alphabet that have half of the shorter one in common."""
    found: list[Family] = []
    for row in sorted(range(len(prompts)), key=lambda row: list(prompts[row])):
        alone = Family([row], len(prompts[row]) - 1)
        if found:
            before, shared = found[-1], _common(prompts[found[-1].rows[-1]], prompts[row])
            if 2 * shared >= min(len(prompts[before.rows[-1]]), len(prompts[row])):
                found[-1] = Family([*before.rows, row], min(before.shared, shared, alone.shared))
                continue
        found.append(alone)
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
