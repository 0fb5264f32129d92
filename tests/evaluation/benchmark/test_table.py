from __future__ import annotations

from dataclasses import replace

from msrnn.evaluation.benchmark.table import Row, markdown, remarks, table
from msrnn.evaluation.benchmark.timing import Times

TEN = Times(10, 10, 10)
FULL = Row("full", None, 4000, 2, TEN, 8.0, 2, TEN, TEN, None, 300.0)


def by_column(rows: list[Row], row: int) -> dict[str, str]:
    found = table(rows, "")
    return dict(zip(found.header, found.strings()[row], strict=True))


def test_a_table() -> None:
    ten, five, one = Times(10, 10, 10), Times(5, 4, 6.5), Times(1, 1, 1, steady=False)
    rows = [Row("full", None, 4000, 2, ten, 8.0, 2, ten, five, Times(700, 700, 700), 300.0)]
    rows.append(Row("tova 8", 8, 400, 10, five, 4.0, 2, one, one, None, 1200.0))
    shown = by_column(rows, 1)
    assert shown["relative"] == "10.00"
    assert shown["relative, whole sequences"] == "4.00"
    assert shown["over floor"] == "1.25"
    assert shown["tokens/s at batch 2"] == "2,000"
    assert shown["prefill ms"] == "—"
    text = markdown(rows, {"torch": "2", "commit": ""})
    assert "| tova 8 | 400 bytes | 10 | 5.00 · 4.00–6.50 | 2,000 | 10.00 | 1.25 |" in text  # noqa: RUF001
    assert "Runs of tova 8 still differ" in text
    assert "below the floor" not in text
    assert text.endswith("\n\n- torch: 2\n")


def test_a_row_is_as_it_was_stored() -> None:
    assert Row.of(FULL.fields) == FULL
    assert FULL.fields["ms"] == [*TEN]


def test_what_was_not_measured_has_no_number() -> None:
    row = Row("tova 8", 8, 400)
    assert (row.throughput, row.equal_throughput, row.over_floor, row.impossible, row.unsteady) == (
        *[None] * 3,
        *[False] * 2,
    )
    assert by_column([FULL, row], 1)["relative"] == "—"
    assert "tokens/s at batch —" in table([row], "").header


def test_a_step_below_its_floor_is_impossible() -> None:
    assert not FULL.impossible
    low = replace(FULL, floor=11.0)
    assert low.impossible
    assert by_column([low], 0)["over floor"] == "0.91 !"
    assert any("below the floor, which is impossible" in remark for remark in remarks([low]))


def test_runs_that_differ_are_named() -> None:
    unsteady = replace(FULL, prefill_ms=Times(1, 1, 9, steady=False))
    assert len(remarks([FULL])) == 1
    assert any("Runs of full still differ" in remark for remark in remarks([unsteady]))
