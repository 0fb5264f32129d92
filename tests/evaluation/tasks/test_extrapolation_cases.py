from __future__ import annotations

from pathlib import Path

import pytest

from msrnn.evaluation.tasks.extrapolation_cases import Case, cases
from tests.helpers.courses import CASES, SIZE


def test_rows() -> None:
    assert CASES[0] == Case("tova", "compressed:lnln", SIZE)
    assert cases(["tova", "tova@compressed", "tova@compressed:lnln", "full"], SIZE) == [
        CASES[0],
        Case("full", "original", None),
    ]
    for row, reason in {
        "tovas@compact": "did you mean 'tova'",
        "tova@xyz": "positions='xyz'",
        "full@compact": "row 'full@compact'",
    }.items():
        with pytest.raises(ValueError, match=reason):
            cases([row], SIZE)


def test_a_row_may_name_a_file_of_row_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"some")
    rows = [f"echo@{path}", f"echo@{path}@compressed:15", f"echo@{path}:upper@compact"]
    found = cases(rows, SIZE)
    assert found == [
        Case(f"echo@{path}", "compressed:lnln", SIZE),
        Case(f"echo@{path}", "compressed:15", SIZE),
        Case(f"echo@{path}:upper", "compact", SIZE),
    ]
    assert cases([case.label for case in found], SIZE) == found
    before = found[0].key
    path.write_bytes(b"other")
    assert found[0].key != before
