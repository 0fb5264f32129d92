from __future__ import annotations

from command import Run

from msrnn.policy import NAMES


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
