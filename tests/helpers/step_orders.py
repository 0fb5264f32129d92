"""The two orders of an engine's steps: as on a CPU, and as on a GPU."""

from __future__ import annotations

import pytest

from msrnn.engine import scheduler
from msrnn.engine.batch import Batch

ORDERS = ["in-order", "overlapping"]
both_orders = pytest.mark.parametrize("overlaps", [False, True], ids=ORDERS, indirect=True)
# For tests of what the engine's own tests have in both orders: the other one runs with the slow tests.
second_order_slow = pytest.mark.parametrize(
    "overlaps", [False, pytest.param(True, marks=pytest.mark.slow)], ids=ORDERS, indirect=True
)


def use_order(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    """Engines that are made from now on look at the tokens of a step at once, or while the next step runs."""

    class Chosen(Batch):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            self.overlaps = overlaps

    monkeypatch.setattr(scheduler, "Batch", Chosen)
