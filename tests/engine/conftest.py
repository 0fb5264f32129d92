"""Engines as on a CPU, and as on a GPU, where the tokens of a step are looked at while the next one runs."""

from __future__ import annotations

import pytest

from tests.helpers.step_orders import use_order


@pytest.fixture(params=[False, True], ids=["in-order", "overlapping"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    use_order(monkeypatch, request.param)
    return bool(request.param)
