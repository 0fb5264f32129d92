from __future__ import annotations

from pathlib import Path

import pytest

from msrnn.cli.results_folder import note_other_records, open_store, write_report
from msrnn.errors import UsageError
from msrnn.evaluation.report import Table
from msrnn.evaluation.tasks.perplexity import CHECK


def test_a_store_in_a_new_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new" / "out", "perplexity", CHECK, force=False, skip_damaged=False)
    assert store.path == tmp_path / "new" / "out" / "perplexity.jsonl"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--out .*file: a file; give a folder"):
        open_store(tmp_path / "file", "perplexity", CHECK, force=False, skip_damaged=False)


def test_damaged_lines_name_the_option_that_skips_them(tmp_path: Path) -> None:
    path = tmp_path / "perplexity.jsonl"
    path.write_text("no JSON\n")
    with pytest.raises(UsageError, match=r"line 1: damaged.*: add --skip-damaged$"):
        open_store(tmp_path, "perplexity", CHECK, force=False, skip_damaged=False)
    assert open_store(tmp_path, "perplexity", CHECK, force=False, skip_damaged=True).records == []


def test_files_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("x", "title", "", ["name", "value"], [["a", 1]])
    write_report(tmp_path, table, "page")
    assert [path.name for path in tmp_path.iterdir()] == ["x.md"]
    write_report(tmp_path, table._replace(lines=[["name"], ["a"]]), "page", lambda: None)
    assert {path.name for path in tmp_path.iterdir()} == {"x.md", "x.csv"}
    assert capsys.readouterr().err.splitlines()[-1].endswith("x.jsonl, x.md, x.csv, x.png, x.svg")


def test_records_that_the_tables_show_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    note_other_records([], 0)
    assert capsys.readouterr().err == ""
    note_other_records(["tova 8", "full"], 1200)
    shown, left_out = capsys.readouterr().err.splitlines()
    assert "tova 8, full" in shown
    assert "1,200 records" in left_out
