from __future__ import annotations

import pytest

from msrnn.core.torchrun import is_first, is_torchrun


@pytest.mark.parametrize(
    ("variables", "started", "first"),
    [
        ({}, False, True),
        ({"WORLD_SIZE": "2", "RANK": "1"}, False, True),  # of another launcher
        ({"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "1", "RANK": "0"}, False, True),
        ({"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "RANK": "0"}, True, True),
        ({"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "RANK": "1"}, True, False),
    ],
)
def test_a_process_of_a_job(
    variables: dict[str, str], started: bool, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (is_torchrun(), is_first()) == (started, first)
