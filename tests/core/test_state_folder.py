"""State folders: files by name, private, bounded in bytes, and what belongs to others is left alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from msrnn.core.segment_folder import SEGMENTS, find_folder, link_segments, list_segments, new_path
from msrnn.core.shared_sizes import FileSizes
from msrnn.core.state_folder import LimitedStateFolder, StateFolder
from msrnn.errors import FileError


class Texts:
    """States that are texts, in JSON files."""

    def save(self, state: str, path: Path, notes: Mapping[str, Any]) -> None:
        path.write_text(json.dumps({"state": state, "notes": dict(notes)}))

    def load(self, path: Path) -> str:
        return str(json.loads(path.read_text())["state"])

    def describe(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            raise FileError("no such file", path)
        return {"notes": json.loads(path.read_text())["notes"]}


class Replaced(Texts):
    """The file is replaced while it is read for the first time."""

    replaced = False

    def load(self, path: Path) -> str:
        found = super().load(path)
        if not self.replaced:
            self.replaced = True
            self.save("new", path, {"turn": 2})
        return found


def is_own(name: str) -> bool:
    return name.startswith("a")


def limited(path: Path, most: int) -> LimitedStateFolder[str]:
    return LimitedStateFolder(path, Texts(), is_own, most)


def test_states_by_name(tmp_path: Path) -> None:
    folder = StateFolder[str](tmp_path / "made" / "states", Texts(), is_own)
    assert folder.list_names() == []
    assert folder.save("a1", "text", {"turn": 1}) == FileSizes(folder.path_of("a1").stat().st_size)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert ("a1" in folder, "a2" in folder) == (True, False)
    assert folder.load("a1") == ("text", {"notes": {"turn": 1}})
    assert folder.describe("a1") == ({"notes": {"turn": 1}}, folder.sizes_of("a1"))
    folder.save("a1", "longer text", {"turn": 2})
    assert folder.load("a1") == ("longer text", {"notes": {"turn": 2}})
    folder.delete("a1")
    folder.delete("a1")
    assert folder.list_names() == []
    with pytest.raises(FileError):
        folder.load("a1")


def test_state_and_notes_are_of_one_version(tmp_path: Path) -> None:
    folder = StateFolder[str](tmp_path, Replaced())
    folder.save("a", "old", {"turn": 1})
    assert folder.load("a") == ("new", {"notes": {"turn": 2}})


class Vanishing(Texts):
    """The first time, a part of the state is gone before it is read, since the file was replaced."""

    replaced = False

    def load(self, path: Path) -> str:
        if not self.replaced:
            self.replaced = True
            self.save("new", path, {"turn": 2})
            raise FileError("a segment of an archive is missing", path)
        return super().load(path)


def test_a_state_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    folder = StateFolder[str](tmp_path, Vanishing())
    folder.save("a", "old", {"turn": 1})
    assert folder.load("a") == ("new", {"notes": {"turn": 2}})
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(FileError):
        folder.load("a")


class Broken(Texts):
    def load(self, path: Path) -> str:
        raise FileError("a segment of an archive is missing", path)


def test_a_state_that_is_damaged_is_not_read_again_and_again(tmp_path: Path) -> None:
    folder = StateFolder[str](tmp_path, Broken())
    folder.save("a", "old", {})
    with pytest.raises(FileError, match="is missing"):
        folder.load("a")


def add_segments(path: Path) -> dict[str, int]:
    find_folder(path).mkdir()
    for first in (0, 1024):
        new_path(find_folder(path), first).write_bytes(b"rows")
    return list_segments(path)


def test_segments_belong_to_their_state(tmp_path: Path) -> None:
    folder = StateFolder[str](tmp_path, Texts())
    own = folder.save("A", "text", {}).own
    segments = add_segments(folder.path_of("A"))
    assert folder.sizes_of("A") == folder.describe("A")[1] == FileSizes(own, segments)
    folder.rename("A", "=a")
    assert {path.name for path in tmp_path.iterdir()} == {"=a.safetensors", "=a.archive"}
    assert folder.sizes_of("=a") == FileSizes(own, segments)
    folder.delete("=a")
    assert [*tmp_path.iterdir()] == []


def test_segments_that_cannot_be_removed_do_not_keep_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = StateFolder[str](tmp_path, Texts())
    folder.save("a", "text", {})
    add_segments(folder.path_of("a"))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("msrnn.core.state_folder.remove_segments", refuse)
        folder.delete("a")
    assert folder.list_names() == []
    assert "a.safetensors stay: [Errno 13] Permission denied" in caplog.text
    folder.remove_unfinished()
    assert [*tmp_path.iterdir()] == []


def test_segments_of_a_file_that_cannot_be_read_stay(tmp_path: Path) -> None:
    class Unreadable(Texts):
        def describe(self, path: Path) -> dict[str, Any]:
            raise FileError("damaged", path)

    folder = StateFolder[str](tmp_path, Unreadable())
    folder.save("a", "text", {})
    segments = add_segments(folder.path_of("a"))
    folder.remove_unfinished()
    assert list_segments(folder.path_of("a")) == segments


def test_a_shared_segment_counts_once_in_a_limited_folder(tmp_path: Path) -> None:
    one = StateFolder[str](tmp_path, Segmented()).save("a1", "text", {}).own
    segments = add_segments(tmp_path / "a1.safetensors")
    StateFolder[str](tmp_path, Segmented()).save("a2", "text", {})
    link_segments(tmp_path / "a1.safetensors", tmp_path / "a2.safetensors")
    os.utime(tmp_path / "a1.safetensors", (1, 1))
    most = 2 * one + sum(segments.values())
    folder = LimitedStateFolder[str](tmp_path, Segmented(), is_own, most)
    assert (folder.list_names(), folder.nbytes) == (["a1", "a2"], most)
    folder = LimitedStateFolder[str](tmp_path, Segmented(), is_own, most - 1)
    assert (folder.list_names(), folder.nbytes) == (["a2"], most - one)
    assert list_segments(tmp_path / "a2.safetensors") == segments
    assert {path.name for path in tmp_path.iterdir()} == {"a2.safetensors", "a2.archive"}


class Segmented(Texts):
    """Files that name all segments of their folder."""

    def describe(self, path: Path) -> dict[str, Any]:
        return {**super().describe(path), SEGMENTS: [[[*pair] for pair in list_segments(path).items()]]}


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in (".a1.safetensors.x1y2.tmp", ".b1.safetensors.x1y2.tmp", ".a1.txt.x1y2.tmp"):
        (tmp_path / name).mkdir()
    for name in ("b1.safetensors", "a1.txt"):
        (tmp_path / name).write_text("of others")
    folder = limited(tmp_path, 1000)
    folder.save("a1", "text", {})
    assert (folder.list_names(), len(folder)) == (["a1"], 1)
    left = {path.name for path in tmp_path.iterdir()}
    others = {".b1.safetensors.x1y2.tmp", ".a1.txt.x1y2.tmp", "b1.safetensors", "a1.txt"}
    assert left == others | {"a1.safetensors"}
    assert {path.name for path in limited(tmp_path, 0).path.iterdir()} == others


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = StateFolder[str](tmp_path, Texts())
    folder.save("a", "text", {})
    folder.set_aside("a", ValueError("damaged"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors.damaged"]
    assert folder.list_names() == []
    folder.set_aside("a", ValueError("it is not there"))
    assert "a.safetensors stays where it is" in caplog.text


def test_the_least_recently_used_file_is_deleted_first(tmp_path: Path) -> None:
    folder = limited(tmp_path, 1000)
    one = folder.save("a1", "text", {}).nbytes
    for number, name in enumerate(("a1", "a2", "a3")):
        folder.save(name, "text", {})
        os.utime(folder.path_of(name), (number, number))
    folder.load("a1")
    folder = limited(tmp_path, 3 * one)  # after a restart
    assert folder.list_names() == ["a2", "a3", "a1"]
    folder.save("a4", "text", {})
    folder.load("a3")
    folder.save("a5", "text", {})
    assert folder.list_names() == ["a4", "a3", "a5"]
    assert folder.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir()) == 3 * one
    assert limited(tmp_path, one).list_names() == ["a5"]
