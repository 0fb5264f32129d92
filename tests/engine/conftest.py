"""Engines as on a CPU, and as on a GPU, where the tokens of a step are looked at while the next one runs."""

from __future__ import annotations

import pytest

from msrnn.engine import engine
from msrnn.engine.batch import Batch


@pytest.fixture(params=[False, True], ids=["in-order", "overlapping"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    class Chosen(Batch):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            self.overlaps = request.param

    monkeypatch.setattr(engine, "Batch", Chosen)
    return bool(request.param)
