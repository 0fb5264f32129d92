"""The folder of a state's segments: what may be in it, what is shared, and what is removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from msrnn.core.segment_folder import (
    SEGMENTS,
    SegmentFile,
    find_folder,
    link_segment,
    link_segments,
    list_named,
    list_names,
    list_segments,
    move_folder,
    new_path,
    remove_segments,
)
from msrnn.errors import FileError

NAME = "0000001024-" + "0123456789abcdef" * 2 + ".safetensors"


def add_segment(state: Path, first: int = 0, data: bytes = b"rows") -> SegmentFile:
    folder = find_folder(state)
    folder.mkdir(parents=True, exist_ok=True)
    path = new_path(folder, first)
    path.write_bytes(data)
    return SegmentFile(path, len(data))


def test_a_state_file_names_its_segments(tmp_path: Path) -> None:
    path = tmp_path / "talk.safetensors"
    assert list_named(path, {}) == []
    (found,) = list_named(path, {SEGMENTS: [[[NAME, 70]]]})
    assert found == [SegmentFile(tmp_path / "talk.archive" / NAME, 70)]
    assert not found[0].is_whole()
    assert list_named(path, {SEGMENTS: [[[NAME, 70]], [], [[NAME, 70]]]}) == [found, [], found]
    assert find_folder(tmp_path / "no.suffix").name == "no.suffix.archive"
    assert new_path(tmp_path, 5) != new_path(tmp_path, 5)


@pytest.mark.parametrize(
    "named",
    [
        7,
        {"a": []},
        [7],
        [[NAME]],
        [[[NAME]]],
        [[[NAME, True]]],
        [[[NAME, "70"]]],
        [[[7, 70]]],
        [[["../" + NAME, 70]]],
        [[["/etc/passwd", 70]]],
        [[[NAME + "\n", 70]]],
        [[[NAME, 70], [NAME, 70]]],
    ],
    ids=str,
)
def test_names_are_not_trusted(named: Any, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"x\.safetensors: segments"):
        list_named(tmp_path / "x.safetensors", {SEGMENTS: named})


def test_segments_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    state = tmp_path / "talk.safetensors"
    remove_segments(state, [])  # there is no folder
    kept, gone = add_segment(state, 0), add_segment(state, 1024)
    folder = find_folder(state)
    (folder / f".{NAME}.x1y2.tmp").mkdir()
    (folder / "mine.txt").touch()
    assert list_segments(state) == {kept.path.name: 4, gone.path.name: 4}
    assert list_names(tmp_path) == ["talk"]
    remove_segments(state, [gone.path.name, gone.path.name])
    assert {path.name for path in folder.iterdir()} == {kept.path.name, "mine.txt"}
    remove_segments(state, list_segments(state))
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    remove_segments(state, [])
    assert not folder.exists()


def test_states_of_one_folder_share_a_segment(tmp_path: Path) -> None:
    file, fork = add_segment(tmp_path / "a.safetensors"), tmp_path / "b.archive"
    fork.mkdir()
    shared = link_segment(file, fork)
    assert shared == SegmentFile(fork / file.path.name, 4)
    assert shared.path.samefile(file.path)
    assert link_segment(file, fork) == shared  # it is there
    file.path.unlink()
    third = tmp_path / "c.archive"
    third.mkdir()
    assert link_segment(file, third) is not None  # that of the fork
    assert shared.path.stat().st_nlink == 2


def test_nothing_is_shared_with_another_owner(tmp_path: Path) -> None:
    file, other = add_segment(tmp_path / "ann" / "a.safetensors"), tmp_path / "bob" / "a.archive"
    other.mkdir(parents=True)
    assert link_segment(file, other) is None
    assert [*other.iterdir()] == []


def test_what_cannot_be_shared_must_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, fork = add_segment(tmp_path / "a.safetensors"), tmp_path / "b.archive"
    fork.mkdir()

    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patch:  # a file system without links
        patch.setattr(os, "link", refuse)
        assert link_segment(file, fork) is None
    file.path.write_bytes(b"cut")
    assert link_segment(file, fork) is None
    (fork / file.path.name).write_bytes(b"cut as well")
    assert link_segment(file, fork) is None
    file.path.unlink()
    (fork / file.path.name).unlink()
    assert link_segment(file, fork) is None
    assert [*fork.iterdir()] == []


def test_folders_are_linked_and_moved(tmp_path: Path) -> None:
    state, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    link_segments(state, other)
    move_folder(state, ".damaged")
    assert [*tmp_path.iterdir()] == []
    add_segment(state)
    link_segments(state, other)
    assert list_segments(state) == list_segments(other) != {}
    assert find_folder(other).stat().st_mode & 0o777 == 0o700
    for _ in range(2):
        add_segment(state)
        move_folder(state, ".damaged")
    assert {path.name for path in tmp_path.iterdir()} == {"a.archive.damaged", "b.archive"}
    assert len([*(tmp_path / "a.archive.damaged").iterdir()]) == 1
