from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from msrnn.checks import check_count, check_folder, check_number, is_deeper, is_number, is_whole
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


@pytest.mark.parametrize("value", [True, False, 0, -1, 8, 1.0, "1", None, [1], 10**400, float("nan")])
def test_a_count_that_is_none(value: Any) -> None:
    with pytest.raises(UsageError, match=r"must be a whole number of rows, from 1 to 7") as error:
        check_count("rows", value, 1, 7, of="rows")
    assert (error.value.name, error.value.value is value) == ("rows", True)
    assert [check_count("rows", one, 1, 7) for one in (1, 7)] == [1, 7]
    assert check_count("rows", 10**30) == 10**30


@pytest.mark.parametrize("value", [True, "0.5", None, float("nan"), float("inf"), 10**400, -0.1, 1.1])
def test_a_number_that_is_none(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^share=.*: must be a number from 0 to 1$"):
        check_number("share", value, 0, 1)
    assert [check_number("share", one, 0, 1) for one in (0, 0.5, 1)] == [0, 0.5, 1]


def test_a_number_without_an_upper_bound() -> None:
    assert check_number("seconds", 1e300, 0) == 1e300
    for value in (-1, math.inf):
        with pytest.raises(UsageError, match=r"^seconds=.*: must be a number, 0 or more; wait longer$"):
            check_number("seconds", value, 0, advice="wait longer")


def test_folders(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path, tmp_path / "new" / "folder", Path("new")):
        assert check_folder("here", folder) == folder
    with pytest.raises(UsageError, match=r"^here='.*file': is a file; name a folder$"):
        check_folder("here", file)
    with pytest.raises(UsageError, match=r"^here='.*in': .*file is a file; name a folder$"):
        check_folder("here", file / "folder" / "in")


@pytest.mark.parametrize(
    ("value", "depth"),
    [(5, 0), ("text", 0), ({}, 1), ([[]], 2), ({"a": [{"b": 1}]}, 3), ([1, [2], [[3]]], 3), (([],), 2)],
)
def test_how_deep_a_value_is(value: object, depth: int) -> None:
    assert not is_deeper(value, depth)
    assert depth == 0 or is_deeper(value, depth - 1)
