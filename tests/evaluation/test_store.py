from __future__ import annotations

import os
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path

import pytest

from msrnn.evaluation.benchmark.measurement import Ledger, check_record
from msrnn.evaluation.schemas import Schema, check_of
from msrnn.evaluation.store import Store, read_records


class Number(Schema):
    a: float


def test_rows_outlive_the_store(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = Store(path)
    first.append({"a": 1, "b": None})
    first.append({"a": 2, "c": [1.5]})
    again = Store(path)
    assert again.records == first.records == [{"a": 1, "b": None}, {"a": 2, "c": [1.5]}]
    again.append({"a": 3})
    assert [row["a"] for row in read_records(path)] == [1, 2, 3]


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


def test_a_line_that_was_cut_off_is_not_read_and_makes_room_for_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"cell": "a", "value": 1}\n{"cell": "b", "va')
    assert read_records(path) == [{"cell": "a", "value": 1}]
    Store(path).append({"cell": "b"})
    assert path.read_text() == '{"cell": "a", "value": 1}\n{"cell": "b"}\n'


def test_a_process_that_is_killed_while_another_appends_costs_no_row(tmp_path: Path) -> None:
    """What it left of its line is cut off before the next row, and not glued to it."""
    path = tmp_path / "rows.jsonl"
    store = Store(path)
    store.append({"a": 1})
    with path.open("a") as killed:
        killed.write('{"a": 2, "b')
    store.append({"a": 3})
    assert [row["a"] for row in read_records(path)] == [1, 3]


@pytest.mark.parametrize("content", [b"words\n", b"[1]\n", b"words\nand a rest", b"\xff\xfe\n", b"[" * 9**6 + b"\n"])
def test_a_foreign_file_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: damaged.*skip damaged lines"):
        read_records(path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("rows.jsonl", content)]


def test_damaged_lines_are_named_and_skipped_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [b'{"a": 1}', b'{"a": ', b'{"a": 2}', b"\xff", b'{"b": 3}', b'{"a": "x"}', b'{"a": 4}']
    path.write_bytes(b"\n".join([*lines, b'{"a"']))
    check = check_of(Number)
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: damaged, not JSON.* \(and 3 more lines\)"):
        Store(path, check)
    assert [row["a"] for row in Store(path, check, skip_damaged=True).records] == [1, 2, 4]
    assert (tmp_path / "rows.damaged").read_bytes() == b"\n".join([lines[1], *lines[3:6], b""])
    Store(path, check).append({"a": 5})
    assert [row["a"] for row in Store(path, check, skip_damaged=True).records] == [1, 2, 4, 5]
    assert (tmp_path / "rows.damaged").read_bytes().count(b"\n") == 4


def append(path: Path, who: str, rows: int | None) -> None:
    store = Store(path, redo=True, skip_damaged=True)
    for n in islice(count(), rows):
        store.append({"who": who, "number": n, "long": "x" * 5000})


def test_two_processes_and_one_that_is_killed_lose_no_row(tmp_path: Path) -> None:
    path, fork = tmp_path / "rows.jsonl", get_context("fork")  # to import torch thrice takes long
    path.write_text('{"who": "old", "number": 0}\n' + "damage\n" * 3)
    endless = fork.Process(target=append, args=(path, "killed", None))
    others = [fork.Process(target=append, args=(path, who, 40)) for who in "ab"]
    for process in (endless, *others):
        process.start()
    for process in others:
        process.join(60)
    endless.kill()
    endless.join(60)
    assert [process.exitcode for process in others] == [0, 0]
    rows = [(row["who"], row["number"]) for row in read_records(path)]
    assert rows.count(("old", 0)) == 1
    for who in ("a", "b", "killed"):
        numbers = [number for name, number in rows if name == who]
        assert numbers == list(range(40 if who != "killed" else len(numbers)))


def test_who_is_killed_while_damaged_lines_move_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    content = b'{"a": 1}\ndamage\n{"a": 2}\n'
    path.write_bytes(content)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("msrnn.evaluation.store.write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            read_records(path, skip_damaged=True)
    assert (path.read_bytes(), (tmp_path / "rows.damaged").read_bytes()) == (content, b"damage\n")
    assert [row["a"] for row in read_records(path, skip_damaged=True)] == [1, 2]


def test_what_is_computed_again_is_only_taken_from_this_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Store(path).append({"a": 1, "value": 1})
    again = Store(path, redo=True)
    assert (again.find_done({"a": 1}), len(again.matching({"a": 1}))) == ([], 1)
    again.append({"a": 1, "value": 2})
    assert [row["value"] for row in again.find_done({"a": 1})] == [2]
    assert [row["value"] for row in Store(path).find_done({"a": 1})] == [1, 2]


def test_a_row_that_the_disk_has_no_room_for_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.append({"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.append({"a": 2})
    assert [row["a"] for row in store.records] == [1]


def test_a_ledger_is_a_view_of_a_store(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def measured(model: str, value: float | None, **options: bool) -> float | None:
        return Ledger(Store(path, check_record, **options), {"model": model}).cell({"cell": "x"}, "ms", lambda: value)

    assert measured("m", None) is None
    assert [measured("m", value) for value in (2.0, 3.0)] == [2.0, 2.0]
    assert measured("n", 3.0) == 3.0
    assert measured("m", 4.0, redo=True) == 4.0
    assert [measured(model, 9.0) for model in "mn"] == [4.0, 3.0]
    assert [row["value"] for row in Store(path).records] == [None, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("row", ['{"cell": "x"}', '{"cell": "x", "value": "fast"}', '{"cell": "row", "value": 1}'])
def test_a_measurement_without_its_value_is_named(row: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{row}\n")
    with pytest.raises(ValueError, match=r"line 1: damaged, (without the|its) field"):
        Store(path, check_record)
