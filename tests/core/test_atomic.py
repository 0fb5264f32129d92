"""Permissions of written files: what the umask gives, and the owner alone for what holds a user's text."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import msrnn
from msrnn.core.atomic import PRIVATE, make_private_folder, remove_unfinished, sync_folder, write_atomically
from tests.helpers.tiny import build, llama, tokens


def permissions(path: Path) -> int:
    return path.stat().st_mode & 0o777


def write(path: Path, mode: int = 0o666) -> int:
    def fill(to: Path) -> None:
        to.write_bytes(b"words")

    write_atomically(path, fill, mode)
    assert path.read_bytes() == b"words"
    return permissions(path)


UMASKS = (0o000, 0o002, 0o022, 0o027, 0o077, 0o177)


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_new_files_have_the_permissions_that_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    """In a process of its own: an umask belongs to a whole process."""
    code = """
        import os, sys
        from pathlib import Path
        from msrnn.core.atomic import PRIVATE, make_private_folder, write_atomically
        os.umask(int(sys.argv[1]))
        os.umask = None  # nothing sets it again
        folder = Path(sys.argv[2])
        for name, mode in (("result", 0o666), ("private", PRIVATE)):
            write_atomically(folder / name, lambda to: to.write_bytes(b"words"), mode)
            print(oct((folder / name).stat().st_mode & 0o777))
        make_private_folder(folder / "a" / "b")
        print(oct((folder / "a" / "b").stat().st_mode & 0o777))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(umask), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [oct(mode & ~umask) for mode in (0o666, 0o600, 0o700)], done.stderr


def test_the_umask_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that other threads make meanwhile would get its permissions."""

    def refuse(_: int) -> int:
        raise AssertionError("the umask belongs to all threads")

    monkeypatch.setattr(os, "umask", refuse)
    write(tmp_path / "new")
    write(tmp_path / "new")
    write(tmp_path / "new", PRIVATE)


@pytest.mark.parametrize(
    ("before", "mode", "after"),
    [
        (0o664, 0o666, 0o664),
        (0o600, 0o666, 0o600),
        (0o644, PRIVATE, 0o600),
        (0o640, PRIVATE, 0o600),
        (0o400, PRIVATE, 0o400),
    ],
)
def test_a_replaced_file_keeps_its_permissions_but_for_those_of_others(
    before: int, mode: int, after: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"older")
    path.chmod(before)
    assert write(path, mode) == after


def test_the_file_behind_a_link_becomes_private_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"older")
    (tmp_path / "file").chmod(0o644)
    (tmp_path / "link").symlink_to("file")
    assert write(tmp_path / "link", PRIVATE) == 0o600
    assert (tmp_path / "link").is_symlink()
    assert permissions(tmp_path / "file") == 0o600


def test_a_folder_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    make_private_folder(tmp_path / "shared")
    assert permissions(tmp_path / "shared") == 0o750


def test_a_saved_state_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 8)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    for path in (tmp_path / "new", tmp_path / "older"):
        (tmp_path / "older").touch(0o644)
        state.save(path, {"tokens": tokens(1, 12)[0].tolist()})
        assert permissions(path) == 0o600
        assert rnn.load_state(path).seen.tolist() == [12]


def test_a_folder_is_synchronized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    sync_folder(tmp_path)
    assert synced == [tmp_path.stat().st_ino]
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "none")


@pytest.mark.parametrize("name", ["a" * 180 + ".safetensors", "ä" * 90])
def test_an_unfinished_file_of_a_long_name_is_found(name: str, tmp_path: Path) -> None:
    unfinished: list[Path] = []

    def fill(to: Path) -> None:
        to.write_text("text")
        unfinished.append(to.parent)

    write_atomically(tmp_path / name, fill)
    unfinished[0].mkdir()  # as a process that was killed leaves it
    remove_unfinished(tmp_path, lambda found: found == name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
