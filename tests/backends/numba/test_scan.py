"""`scan_numba` against `scan_torch`: the same eviction times, importances and attention."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from msrnn.backends.numba.scan import scan_numba
from tests.helpers.scans import check, chunks


@settings(max_examples=60, derandomize=True)
@given(case=chunks(rows=20))
def test_the_compiled_loop(case: dict[str, Any]) -> None:
    check(scan_numba, case, "cpu")
