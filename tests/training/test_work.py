from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from msrnn.errors import DoesNotFitError, FileError
from msrnn.training.work import WorkFolder, digest_of


def test_the_same_training_continues_and_another_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    work = WorkFolder(out, {"seed": 0})
    assert not work.resumes
    work.file("part").write_text("done")
    again = WorkFolder(out, {"seed": 0})
    assert again.resumes
    assert again.file("part").read_text() == "done"
    with pytest.raises(FileError, match=r"w\.safetensors\.work: the unfinished work of another training; repeat"):
        WorkFolder(out, {"seed": 1})
    restarted = WorkFolder(out, {"seed": 1}, restart=True)
    assert not restarted.resumes
    assert not restarted.file("part").exists()
    restarted.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_folder_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    (tmp_path / "w.safetensors.work").mkdir()
    (tmp_path / "w.safetensors.work" / "letter.txt").write_text("dear")
    for restart in (False, True):
        with pytest.raises(FileError, match="unfinished work of another training"):
            WorkFolder(out, {"seed": 0}, restart)
    assert (tmp_path / "w.safetensors.work" / "letter.txt").read_text() == "dear"


def test_a_full_disk_is_refused_with_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WorkFolder(tmp_path / "w.safetensors", {})
    usage = SimpleNamespace(free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    work.check_space(10**8)
    with pytest.raises(DoesNotFitError, match=r"2\.0 GB on the disk of .*, and 0\.1 GB is free: use fewer chunks"):
        work.check_space(2 * 10**9)


def test_digests() -> None:
    assert digest_of(b"a", b"b") == digest_of(b"ab") != digest_of(b"ba")
