"""State folders: files by name, private, bounded in bytes, and what belongs to others is left alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

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
