from __future__ import annotations

import pytest

from tests.helpers.served import SECRET


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations collect garbage between cells, which takes longer than most of what these tests compute."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


@pytest.fixture
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for endpoints, and no waits between retries."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setattr("openai._base_client.time.sleep", lambda _: None)
