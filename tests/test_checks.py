from __future__ import annotations

import math
from typing import Any

import pytest

from msrnn.checks import check_count, check_number, is_number, is_whole
from msrnn.errors import UsageError


@pytest.mark.parametrize(
    ("value", "whole", "number"),
    [
        (3, True, True),
        (10**400, True, True),  # too large for a float
        (0.5, False, True),
        (True, False, False),
        (math.nan, False, False),
        (-math.inf, False, False),
        ("3", False, False),
        (None, False, False),
    ],
    ids=str,
)
def test_numbers(value: Any, whole: bool, number: bool) -> None:
    assert (is_whole(value), is_number(value)) == (whole, number)


@pytest.mark.parametrize("value", [0, 9, 1.0, True, "1", None])
def test_counts_out_of_bounds(value: Any) -> None:
    assert check_count("--size", 8, most=8) == 8
    with pytest.raises(UsageError, match=r"--size=.*: must be a whole number of rows, from 1 to 8") as refused:
        check_count("--size", value, most=8, of="rows")
    assert (refused.value.name, refused.value.value) == ("--size", value)


@pytest.mark.parametrize("value", [-0.1, 2.1, math.nan, True, "1"])
def test_numbers_out_of_bounds(value: Any) -> None:
    assert check_number("--top-p", 2, 0, 2) == 2.0
    with pytest.raises(UsageError, match=r"--top-p=.*: must be a number from 0 to 2"):
        check_number("--top-p", value, 0, 2)
