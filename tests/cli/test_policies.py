from __future__ import annotations

import pytest

from msrnn.policy import MEANINGS, NAMES
from tests.helpers.command import Run


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_policies_can_be_read_at_any_width(columns: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run("policies", small=True)
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    words = {word.strip("│┃,.()…") for word in out.split()}
    told = " ".join([*MEANINGS.values(), *NAMES, "NAME+I~H decay recent value none layer head 0.98 40% 50% protected"])
    assert {word.strip("│┃,.()…") for word in told.split()} <= words


def test_policies_shows_every_name(run: Run) -> None:
    code, out, _ = run("policies", small=True)
    assert code == 0
    first = {line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")}
    assert {*NAMES, "full", "NAME+I"} <= first
    assert [cell.strip() for cell in next(x for x in out.splitlines() if "│ h2o " in x).split("│")][2:6] == [
        "1",
        "head",
        "0",
        "50%",
    ]
