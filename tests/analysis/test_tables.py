"""Every table's and figure's numbers, from two chunks made by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy
import pytest

from msrnn.analysis import tables
from msrnn.analysis.study import Study, study
from msrnn.analysis.summary import summarize
from msrnn.analysis.tables import make_tables, write_tables
from msrnn.evaluation.report import Table
from tests.helpers.handmade import IDS, LENGTH, NAMES, SIZE, WINDOW, traced
from tests.helpers.handmade import made as made


def rows(table: Table | None) -> list[list[str]]:
    assert table is not None
    return table.strings()


def test_the_papers_tables(made: Study) -> None:
    assert rows(tables.retention(made))[:4] == [
        ["tova", "2", "2", "3", "0", "1", "2"],
        ["tova", "2", "4", "3", "2", "1", "2"],
        ["tova", "2", "6", "3", "4", "1", "2"],
        ["tova", "2", "7", "3", "5", "1", "2"],
    ]
    assert rows(tables.recent(made)) == [
        ["tova", "83.3%"],
        ["tova, all steps", "89.6%"],
        ["h2o", "91.7%"],
        ["h2o, all steps", "94.8%"],
    ]
    assert rows(tables.recent_by_layer(made)) == [["0", "83.3%", "83.3%"], ["1", "83.3%", "100.0%"]]
    first = rows(tables.first_positions(made))
    assert len(first) == LENGTH
    assert first[:2] == [["0", "5.5", "4.2"], ["1", "2.5", "2.8"]]
    assert rows(tables.tags(made)) == [
        ["`all`", "16", "2.6", "2.6"],  # whatever the policy
        ["`.`", "6", "2.5", "2.8"],
        ["`newline`", "1", "2.0", "2.0"],
        ["`NN`", "4", "3.8", "3.1"],
        ["`XX`", "1", "3.0", "2.8"],
        ["`no word`", "4", "1.8", "2.1"],
    ]


def test_the_papers_figures_stand_beside_its_sizes() -> None:
    long = traced(list(range(256, 600)) + [600] * 256, size=256)
    beside = study([("tova", 256)], lambda _: [long], numpy.zeros((1, 600)), [["POS"] * 300 + ["JJ"] * 300])
    assert rows(tables.recent(beside))[-1] == ["tova, the paper's LLaMA-2-7B", "73%–76%"]  # noqa: RUF001
    table = tables.tags(beside)
    assert table is not None
    assert table.header == ["tag", "tokens", "tova 256", "paper 256"]
    assert [row[-1] for row in table.strings()] == ["249", "1,134", "240"]
    lines = list(csv.DictReader(table.csv().splitlines()))
    assert [line["paper"] for line in lines] == ["249", "1134", "240"]
    assert {line["low"] for line in lines} == {""}  # one chunk cannot tell
    assert "none of these here: `''`, `$`, `)`," in table.note


def test_tables_beyond_the_paper(made: Study) -> None:
    assert rows(tables.lifetimes(made))[0] == ["tova", "2", "2.6", "1", "2", "2", "3", "3", "8", "25.0%"]
    longest = rows(tables.longest_lived(made, lambda token: f"<{token}|"))
    assert longest[:4] == [
        ["tova", "2", "`'<5|'`", "2", "5.5"],
        ["tova", "2", "`'<2|'`", "2", "2.5"],
        ["tova", "2", "`'<1|'`", "5", "2.4"],
        ["tova", "2", "`'<9|'`", "4", "1.8"],
    ]
    assert rows(tables.between_policies(made)) == [["tova and h2o", "83.3%"]]
    assert rows(tables.between_layers(made)) == [
        ["0", "100.0%", "100.0%", "83.3%", "83.3%"],
        ["1", "—", "100.0%", "—", "83.3%"],
    ]
    assert rows(tables.between_heads(made)) == [
        ["0", "66.7%", "66.7%–100.0%"],  # noqa: RUF001
        ["1", "100.0%", "100.0%–100.0%"],  # noqa: RUF001
    ]


def test_what_there_is_nothing_to_tell_of_is_left_out() -> None:
    alone = study([("tova", SIZE)], lambda _: [traced(WINDOW)], IDS[:1])
    assert [table.name for table in make_tables(alone, str)] == [
        *("retention", "recent", "recent-by-layer", "first-positions", "lifetimes"),
    ]
    with pytest.raises(ValueError, match="no traces"):
        summarize("tova", SIZE, [])


def test_files(made: Study, tmp_path: Path) -> None:
    shown = make_tables(made, str)
    write_tables(shown, tmp_path, "a title", {"torch": "2", "commit": ""})
    assert {path.stem for path in tmp_path.glob("*.csv")} == {table.name for table in shown} == NAMES
    text = (tmp_path / "analysis.md").read_text()
    assert all(f"## {table.title}\n\n{table.note}\n" in text for table in shown)
    assert text.endswith("\n- torch: 2\n")
