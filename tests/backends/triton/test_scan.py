"""`scan_triton` against `scan_torch`: the same eviction times and importances."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from msrnn.bound import Bound
from msrnn.policy import Policy
from tests.helpers.scans import check, chunks
from tests.helpers.weights import scan_by_weights


@settings(max_examples=3, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=chunks(rows=8))
def test_the_triton_kernel(case: dict[str, Any], device: str) -> None:
    check(scan_by_weights, case, device)


def test_rows_that_do_not_fit_into_shared_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.backends.triton.scan._shared_memory", lambda _: 0)
    monkeypatch.setattr("msrnn.backends.triton.scan.TILE", 64)
    case = {"heads": 5, "new": 8, "held": 12, "padding": 1, "sinks": True, "seed": 3}
    check(scan_by_weights, {**case, "bound": Bound(Policy(0.5), 12)}, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "heads"), [(512, 32), (1000, 5), (4096, 8)])
def test_wide_rows(size: int, heads: int) -> None:
    case = {"heads": heads, "new": 128, "held": size, "padding": 3, "sinks": False, "seed": 1}
    check(scan_by_weights, {**case, "bound": Bound(Policy(0.0), size)}, "cuda")
