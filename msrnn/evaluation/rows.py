"""What a row of a store must have, field by field."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from msrnn.evaluation.store import Check, Row

Kind = Callable[[Any], bool]


def text(value: Any) -> bool:
    return isinstance(value, str)


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def truth(value: Any) -> bool:
    return isinstance(value, bool)


def mapping(value: Any) -> bool:
    return isinstance(value, dict)


def anything(_: Any) -> bool:
    return True


def optional(kind: Kind) -> Kind:
    return lambda value: value is None or kind(value)


def listed(kind: Kind) -> Kind:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def fields(**kinds: Kind) -> Check:
    """A check that these fields are there, each of its kind."""

    def check(row: Row) -> str | None:
        for name, kind in kinds.items():
            if name not in row:
                return f"without the field {name!r}"
            if not kind(row[name]):
                return f"its field {name!r} is {reprlib.repr(row[name])}"
        return None

    return check


def paired(one: str, other: str, check: Check) -> Check:
    """A check that two lists have the same length, too."""

    def both(row: Row) -> str | None:
        wrong = check(row)
        if wrong is None and len(row[one]) != len(row[other]):
            return f"{len(row[one])} {one} with {len(row[other])} {other}"
        return wrong

    return both
