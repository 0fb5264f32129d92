from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations collect garbage between cells, which takes longer than most of what these tests compute."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)
