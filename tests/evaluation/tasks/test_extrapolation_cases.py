from __future__ import annotations

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
