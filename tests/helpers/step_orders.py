"""The two orders of an engine's steps: as on a CPU, and as on a GPU."""

from __future__ import annotations

import pytest

from msrnn.engine import scheduler
from msrnn.engine.batch import Batch

# For tests that gain nothing from the other order: what is generated does not matter, or another process does it.
one_order = pytest.mark.parametrize("overlaps", [False], indirect=True)


def use_order(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    """Engines that are made from now on look at the tokens of a step at once, or while the next step runs."""

    class Chosen(Batch):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            self.overlaps = overlaps

    monkeypatch.setattr(scheduler, "Batch", Chosen)
