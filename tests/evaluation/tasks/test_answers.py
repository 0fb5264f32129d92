"""Rows of questions and answers: what is refused."""

from __future__ import annotations

from msrnn.evaluation.tasks.answers import Settings, check_record

SETTINGS = Settings("qasper", "f", "float32", False, 64, "original", 4)


def test_a_row_of_an_unknown_kind_is_refused() -> None:
    """Also the marks of files that were written before the field was renamed."""
    assert check_record({**SETTINGS.key, "settings_used": True}) is None
    assert check_record({**SETTINGS.key, "sat": True}) == (
        "without the field 'prediction', 'references', 'settings_used'"
    )
