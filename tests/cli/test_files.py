"""Which files may be replaced, and where a state goes that cannot be written to its file."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import msrnn
from msrnn.cli.files import check_target, save_state
from msrnn.core import state_file as files
from msrnn.core.state_file import load_tensors
from tests.helpers.command import TEXT, Run, same
from tests.helpers.tiny import build, llama, tokens

SIZE = ("--size", 16)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 7))  # as /dev/full
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize(("make", "kind"), [(pipe, "a pipe"), (listening, "a socket"), (device, "a device")])
def test_only_regular_files_are_replaced(make: Any, kind: str, run: Run, tmp_path: Path) -> None:
    make(tmp_path / "odd")
    before = (tmp_path / "odd").stat()
    for words in (("read", "-"), ("generate", "hi"), ("chat",)):
        for name in ("odd", "link"):
            if not (tmp_path / "link").is_symlink():
                (tmp_path / "link").symlink_to("odd")
            code, out, err = run(*words, "--save", tmp_path / name, "--force", stdin="abc")
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert f"{tmp_path / name}: {kind}; name a file to save to" in err
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 8)
    with pytest.raises(ValueError, match=kind):
        rnn.state().save(tmp_path / "odd")
    after = (tmp_path / "odd").stat()
    assert (before.st_mode, before.st_ino) == (after.st_mode, after.st_ino)
    assert sorted(os.listdir(tmp_path)) == ["link", "odd"]


@pytest.mark.parametrize("how", ["same", "relative", "symlink", "hard link", "through a folder"])
def test_its_own_text_is_not_replaced(how: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    story = tmp_path / "story.txt"
    story.write_text(TEXT)
    target = {
        "same": story,
        "relative": Path("story.txt"),
        "symlink": tmp_path / "sym",
        "hard link": tmp_path / "hard",
        "through a folder": tmp_path / "folder" / "story.txt",
    }[how]
    (tmp_path / "sym").symlink_to(story)
    (tmp_path / "hard").hardlink_to(story)
    (tmp_path / "folder").symlink_to(tmp_path)
    code, _, err = run("read", story, "--save", target, "--force", *SIZE)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{target}: is read by this command" in err
    assert story.read_text() == TEXT


def test_standard_input_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(TEXT)
    words = ["read", "-", "--save", str(tmp_path / "story.txt"), "--force", "--model", str(folder)]
    program = [sys.executable, "-c", "import sys; from msrnn.cli import main; sys.exit(main())", *words]
    with (tmp_path / "story.txt").open() as stdin:
        ran = subprocess.run(program, stdin=stdin, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "is read by this command, as -" in ran.stderr
    assert (tmp_path / "story.txt").read_text() == TEXT


def test_its_own_model_is_not_replaced(run: Run, folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    before = weights.read_bytes()
    (tmp_path / "link").symlink_to(weights)
    for target in (weights, tmp_path / "link"):
        code, _, err = run("generate", "hi", "--save", target, "--force")
        assert (code, err.count("\n")) == (2, 1)
        assert "is read by this command" in err
    assert f"{weights}: exists already" in run("chat", stdin=f"/save {weights}\n").err
    assert weights.read_bytes() == before


def test_a_checkpoint_never_lies_on_the_text(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "book.partial"
    text.write_text(TEXT)
    code, _, err = run("read", text, "--save", tmp_path / "book", *SIZE)
    assert (code, "is read by this command" in err) == (2, True)
    assert text.read_text() == TEXT


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_the_loaded_state_may_be_replaced(link: Any, run: Run, tmp_path: Path) -> None:
    state, other = tmp_path / "state", tmp_path / "other"
    assert run("read", "-", "--save", state, *SIZE, stdin=TEXT[:100]).code == 0
    link(state, other)
    assert run("read", "-", "--load", state, "--save", other, stdin=TEXT[100:]).code == 0
    assert run("read", "-", "--save", tmp_path / "whole", *SIZE, stdin=TEXT).code == 0
    assert same(other, tmp_path / "whole")


def test_a_symbolic_link_stays_and_its_file_is_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "state").write_text("old")
    (tmp_path / "link").symlink_to("far/state")
    (tmp_path / "new").symlink_to("far/new")
    assert run("read", "-", "--save", tmp_path / "link", *SIZE, stdin=TEXT).code == 2
    assert run("read", "-", "--save", tmp_path / "link", "--force", *SIZE, stdin=TEXT).code == 0
    assert run("read", "-", "--save", tmp_path / "new", *SIZE, stdin=TEXT).code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new").is_symlink()
    assert same(tmp_path / "far" / "state", tmp_path / "far" / "new")
    assert sorted(os.listdir(tmp_path / "far")) == ["new", "state"]


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        check_target(tmp_path / "a", force=True)
    (tmp_path / "c").symlink_to("absent/state")
    with pytest.raises(ValueError, match="absent does not exist"):
        check_target(tmp_path / "c", force=True)


def test_names_as_long_as_the_system_allows(tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 8)
    rnn.state().save(tmp_path / ("n" * 255))
    assert os.listdir(tmp_path) == ["n" * 255]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder on a disk that fills up half-way through a file."""
    folder = tmp_path / "full"
    folder.mkdir()

    def save(tensors: Any, path: Path, metadata: Any) -> None:
        if path.parent.parent == folder:  # a file is written in a folder of its own
            path.write_bytes(b"half a fi")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(files, "save_file", save)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return folder


@pytest.mark.parametrize("words", [("read", "-"), ("generate", TEXT, "--max-new-tokens", 4), ("chat",)])
def test_a_full_disk_loses_nothing(words: tuple[object, ...], full: Path, run: Run, tmp_path: Path) -> None:
    code, _, err = run(*words, "--save", full / "state", *SIZE, stdin=TEXT)
    kept = tmp_path / "home" / "msrnn" / "state"
    where = f"the state is saved as {kept} instead, move it from there"
    assert code == 2
    assert err.endswith(f"msrnn: {full / 'state'}: No space left on device; {where}\n")
    assert os.listdir(full) == []
    assert run(*words, "--save", tmp_path / "state", *SIZE, stdin=TEXT).code == 0
    assert same(kept, tmp_path / "state")
    assert run(*words, "--save", full / "state", *SIZE, stdin=TEXT).err.count(f"saved as {kept}.1") == 1


def test_a_home_that_is_full_too(full: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert f"saved as {tmp_path / 'state'}" in run("read", "-", "--save", full / "state", *SIZE, stdin=TEXT).err
    monkeypatch.setattr("tempfile.tempdir", str(full))
    code, out, err = run("read", "-", "--save", full / "state", *SIZE, stdin=TEXT)
    assert (code, out) == (2, "")
    assert err == f"msrnn: {full / 'state'}: No space left on device\n"


def test_a_full_disk_stops_checkpoints_and_not_the_reading(
    full: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.hf.long_read.SECONDS", 0.0)
    (full / "state").symlink_to(tmp_path / "state")
    code, out, err = run("read", "-", "--save", full / "state", *SIZE, stdin=TEXT * 8)
    assert code == 0
    assert err.count("no checkpoint can be saved, reading continues") == 1
    assert "2,185 tokens read" in out
    assert (tmp_path / "state").is_file()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for a few kilobytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root mounts file systems")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_real_disk_that_is_full(small_disk: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    code, out, err = run("read", "-", "--save", small_disk / "state", *SIZE, stdin=TEXT)
    assert (code, out) == (2, "")
    assert "state: No space left on device; the state is saved as" in err
    assert os.listdir(small_disk) == []
    assert load_tensors(tmp_path / "home" / "msrnn" / "state")[1]["size"] == 16


def test_a_limit_on_the_size_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real limit, for every folder, so that the state cannot be saved elsewhere either."""
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 40)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'state'}: File too large") + "$"):
            save_state(rnn.state(), tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_library_raises_what_the_system_said(small_disk: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 40)
    state = rnn.state()
    rnn.read(tokens(1, 50), state)
    with pytest.raises(OSError, match="No space left on device") as error:
        state.save(small_disk / "state")
    assert error.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == []
    assert torch.equal(state.seen, torch.tensor([50]))
