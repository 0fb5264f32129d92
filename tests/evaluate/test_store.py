from __future__ import annotations

import os
from pathlib import Path

import pytest

from msrnn.evaluate.efficiency.ledger import Ledger
from msrnn.evaluate.store import Store, read_rows


def test_rows_outlive_the_store(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = Store(path)
    first.append({"a": 1, "b": None})
    first.append({"a": 2, "c": [1.5]})
    again = Store(path)
    assert again.rows == first.rows == [{"a": 1, "b": None}, {"a": 2, "c": [1.5]}]
    again.append({"a": 3})
    assert [row["a"] for row in read_rows(path)] == [1, 2, 3]


def test_what_matches_has_all_of_the_key() -> None:
    store = Store(None)
    for row in ({"a": 1, "b": None, "c": 0}, {"a": 1, "b": None, "c": 1}, {"a": 1}, {"a": 2, "b": None}):
        store.append(row)
    assert [row["c"] for row in store.matching({"a": 1, "b": None})] == [0, 1]
    assert store.matching({"a": 3}) == []


def test_a_row_is_on_the_disk_before_the_next_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))
    Store(path).append({"a": 1})
    assert synced == [b'{"a": 1}\n']


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"cell": "a", "value": 1}\n{"cell": "b", "va')
    assert read_rows(path) == [{"cell": "a", "value": 1}]
    assert path.read_text() == '{"cell": "a", "value": 1}\n'
    Store(path).append({"cell": "b"})
    assert len(read_rows(path)) == 2


@pytest.mark.parametrize("content", [b"words\n", b"[1]\n", b"words\nand a rest", b"\xff\xfe\n"])
def test_a_foreign_file_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="--force"):
        read_rows(path)
    assert path.read_bytes() == content


def test_a_ledger_is_a_view_of_a_store(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert Ledger(path, {"model": "m"}).cell({"cell": "x"}, "ms", lambda: None) is None
    assert Ledger(path, {"model": "m"}).cell({"cell": "x"}, "ms", lambda: 2.0) == 2.0
    assert Ledger(path, {"model": "m"}).cell({"cell": "x"}, "ms", lambda: 3.0) == 2.0
    assert Ledger(path, {"model": "n"}).cell({"cell": "x"}, "ms", lambda: 3.0) == 3.0
    assert [row["value"] for row in Store(path).rows] == [None, 2.0, 3.0]
