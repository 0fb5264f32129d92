"""Segments in files of their own: a state is the same, the next write is small, and no moment of a write loses one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save as to_bytes

import msrnn
from msrnn.core.segment_folder import SEGMENTS, find_folder
from msrnn.core.state_file import checksum, load_description, load_tensors
from msrnn.core.state_folder import StateFolder
from msrnn.errors import FileError
from msrnn.recall import Recall
from tests.helpers.tiny import build, llama, tokens

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
STEPS = ("mkdir", "link", "fsync", "replace", "rename", "unlink", "rmdir", "chmod")  # of `os`, where a write may end


def recalling(**options: Any) -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(2, 2, **SMALL)), "tova", 16, **{"recall": 8, **options})


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return recalling()


@pytest.fixture(scope="module")
def long(rnn: msrnn.MultiStateRNN) -> msrnn.MultiState:
    """Two whole segments and a part."""
    return read(rnn, rnn.state(), 2100)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "talk.safetensors"


def read(rnn: msrnn.MultiStateRNN, state: msrnn.MultiState, count: int, seed: int = 1) -> msrnn.MultiState:
    rnn.read(tokens(state.batch_size, count, seed), state)
    return state


def save(state: msrnn.MultiState, path: Path, turn: int = 0) -> None:
    state.save(path, {"turn": turn}, segments_apart=True)


class Written(NamedTuple):
    """What tells whether a file was written again."""

    number: int
    bytes: int
    time: int


def segments(path: Path) -> dict[str, Written]:
    stats = {file.name: file.stat() for file in sorted(find_folder(path).glob("*"))}
    return {name: Written(stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def assert_equal(rnn: msrnn.MultiStateRNN, one: msrnn.MultiState, other: msrnn.MultiState) -> None:
    """Both answer the same, from the archive too; neither changes."""
    question = tokens(one.batch_size, 6, seed=9)
    pair = [rnn.read(question, state.fork(1), recall_every=3) for state in (one, other)]
    assert torch.equal(*pair)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state_dtype": "int8"},
        {"recall": Recall(8, state_dtype="fp8")},
        {"recall": Recall(8, search="int8")},
    ],
    ids=str,
)
def test_a_loaded_state_is_the_same(options: dict[str, Any], path: Path, tmp_path: Path) -> None:
    rnn = recalling(**options)
    state = read(rnn, rnn.state(2), 1024)
    for more in (0, 700, 600):  # no rest, one segment, two
        if more:
            read(rnn, state, more, more)
        save(state, path)
        loaded = rnn.load_state(path)
        assert_equal(rnn, loaded, state)
        loaded.save(tmp_path / "one")
        assert_equal(rnn, rnn.load_state(tmp_path / "one"), state)
    assert len(segments(path)) == 2 * 2
    assert (path.stat().st_mode & 0o777, find_folder(path).stat().st_mode & 0o777) == (0o600, 0o700)
    assert {one.stat().st_mode & 0o777 for one in find_folder(path).iterdir()} == {0o600}


def test_a_state_that_a_user_saves_is_one_file(rnn: msrnn.MultiStateRNN, long: msrnn.MultiState, path: Path) -> None:
    save(long, path)
    other = path.with_name("mine.safetensors")
    rnn.load_state(path).save(other)
    assert {found.name for found in path.parent.iterdir()} == {path.name, other.name, "talk.archive"}
    assert load_description(other)["format"] == 1
    assert SEGMENTS not in load_description(other)
    other = other.rename(path.parent.parent / "elsewhere")
    assert_equal(rnn, rnn.load_state(other), long)


def test_a_short_archive_is_in_the_state_file(rnn: msrnn.MultiStateRNN, path: Path) -> None:
    save(read(rnn, rnn.state(), 1023), path)
    assert [*path.parent.iterdir()] == [path]
    assert load_description(path)["format"] == 1


def test_only_new_segments_are_written(rnn: msrnn.MultiStateRNN, path: Path) -> None:
    state = read(rnn, rnn.state(), 3000)
    save(state, path)
    before = segments(path)
    for part in ("in memory", "loaded"):
        state = rnn.load_state(path) if part == "loaded" else state
        save(read(rnn, state, 20), path)
        assert segments(path) == before  # not even their times
    save(read(rnn, state, 1024), path)
    after = segments(path)
    assert {name: one for name, one in after.items() if name in before} == before
    assert len(after) == len(before) + 1 == 3
    one = max(written.bytes for written in after.values())
    assert path.stat().st_size < one + 2 * rnn.state().nbytes  # the state, and what is no whole segment


def test_forks_share_files(rnn: msrnn.MultiStateRNN, long: msrnn.MultiState, path: Path) -> None:
    fork, copy = path.with_name("fork.safetensors"), path.with_name("copy.safetensors")
    mine = long.fork(1)
    save(mine, path)
    theirs = read(rnn, mine.fork(1), 30, seed=5)
    save(theirs, fork)
    save(rnn.load_state(path), copy)
    assert {file.stat().st_nlink for file in find_folder(path).iterdir()} == {3}
    assert segments(path) == segments(fork) == segments(copy)
    assert_equal(rnn, rnn.load_state(fork), theirs)
    assert_equal(rnn, rnn.load_state(copy), mine)
    # Both fill the third segment, each with its own tokens.
    save(read(rnn, mine, 1000, seed=6), path)
    save(read(rnn, theirs, 1000, seed=7), fork)
    assert len({*segments(path)} & {*segments(fork)}) == 2
    assert len(segments(path)) == len(segments(fork)) == 3
    assert_equal(rnn, rnn.load_state(path), mine)
    assert_equal(rnn, rnn.load_state(fork), theirs)


def test_a_fork_that_was_saved_before_its_origin_went_on(rnn: msrnn.MultiStateRNN, path: Path) -> None:
    """Both have one segment in memory, and the fork ends inside of it."""
    state = read(rnn, rnn.state(), 1000)
    short = state.fork(1)
    save(read(rnn, state, 100), path)
    save(short, path.with_name("short.safetensors"))
    assert len(segments(path)) == 1
    assert_equal(rnn, rnn.load_state(path.with_name("short.safetensors")), short)
    assert short.seen.tolist() == [1000]


def test_a_file_of_another_state_is_replaced_with_its_segments(rnn: msrnn.MultiStateRNN, path: Path) -> None:
    save(read(rnn, rnn.state(), 1100), path)
    old = segments(path)
    other = read(rnn, rnn.state(), 1200, seed=3)
    save(other, path)
    assert len(segments(path)) == 1
    assert segments(path).keys().isdisjoint(old)
    assert_equal(rnn, rnn.load_state(path), other)
    save(read(rnn, rnn.state(), 50), path)
    assert [*path.parent.iterdir()] == [path]


def test_the_oldest_segments_are_removed(path: Path) -> None:
    rnn = recalling(recall=Recall(8, limit=600_000))
    state = read(rnn, rnn.state(), 1100)
    found = []
    for seed in range(4):
        save(read(rnn, state, 1100, seed), path)
        found.append({*segments(path)})
        assert_equal(rnn, rnn.load_state(path), state)
        state = rnn.load_state(path)
    assert len(found[-1]) < 5
    assert found[0] - found[-1]


def test_a_file_with_the_whole_archive_is_continued(
    rnn: msrnn.MultiStateRNN, long: msrnn.MultiState, path: Path
) -> None:
    """As files were at first."""
    long.save(path)
    assert [*path.parent.iterdir()] == [path]
    state = rnn.load_state(path)
    save(read(rnn, state, 5), path)
    assert len(segments(path)) == 2
    assert_equal(rnn, rnn.load_state(path), state)


def forge(file: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """Change a segment, and give it the checksum that fits; its length stays."""
    tensors, description = load_tensors(file)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    size = file.stat().st_size
    change(tensors, description)
    description["checksum"] = checksum(tensors)
    for spaces in range(64):
        data = to_bytes(tensors, {"msrnn": json.dumps(description) + " " * spaces})
        if len(data) == size:
            break
    file.write_bytes(data)


def set_infinite(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    tensors["1.values"][0, 3, 2] = float("inf")


def set_layer(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    tensors["2.keys"] = tensors.pop("1.keys")


def set_first(_: dict[str, torch.Tensor], description: dict[str, Any]) -> None:
    description["first"] = 7


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "is missing"),
    "short": (lambda file: file.write_bytes(file.read_bytes()[:-8]), "bytes, not"),
    "long": (lambda file: file.write_bytes(file.read_bytes() + b"12345678"), "bytes, not"),
    "empty": (lambda file: file.write_bytes(b""), "has 0 bytes, not"),
    "zeros": (lambda file: file.write_bytes(bytes(file.stat().st_size)), "truncated, or not a state"),
    "another bit": (flip, "do not match its checksum"),
    "a folder": (make_folder, "bytes, not"),
    "not finite": (lambda file: forge(file, set_infinite), "archived 1.values that are not finite"),
    "another layer": (lambda file: forge(file, set_layer), "has other tensors than 2 layers archive"),
    "another position": (lambda file: forge(file, set_first), "not the archived rows of 1,024 tokens from 0 on"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_segment_is_named(rnn: msrnn.MultiStateRNN, long: msrnn.MultiState, path: Path, damage: str) -> None:
    save(long.fork(1), path)
    file = find_folder(path) / min(segments(path))
    (change, message) = DAMAGES[damage]
    change(file)
    with pytest.raises(FileError, match=message) as error:
        rnn.load_state(path)
    assert error.value.path == str(file)


def test_a_damaged_segment_is_written_again_where_its_rows_are_in_memory(
    rnn: msrnn.MultiStateRNN, long: msrnn.MultiState, path: Path
) -> None:
    state = long.fork(1)
    save(state, path)
    for change in (Path.unlink, lambda file: file.write_bytes(b"short")):
        change(find_folder(path) / min(segments(path)))
        save(state, path)
        assert_equal(rnn, rnn.load_state(path), state)
        assert len(segments(path)) == 2


def test_segments_of_another_file_are_refused(rnn: msrnn.MultiStateRNN, long: msrnn.MultiState, path: Path) -> None:
    """A file that was copied without its folder, and one whose segments are in another order."""
    save(long, path)
    path.rename(path.with_name("moved.safetensors"))
    with pytest.raises(FileError, match=r"moved\.archive.*is missing"):
        rnn.load_state(path.with_name("moved.safetensors"))
    path.with_name("moved.safetensors").rename(path)
    tensors, description = load_tensors(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    for named, message in (
        ([description[SEGMENTS][0][::-1]], "tokens from 0 on"),
        ([description[SEGMENTS][0][:1]], "positions 0 to 1,076, and 2,100 tokens were read"),
        ([[]], "2,100 tokens were read"),
        (description[SEGMENTS] * 0, "2,100 tokens were read"),
        ([*description[SEGMENTS], []], "segments of 2 sequences, and there are 1"),
    ):
        path.write_bytes(to_bytes(tensors, {"msrnn": json.dumps({**description, SEGMENTS: named})}))
        with pytest.raises(FileError, match=message):
            rnn.load_state(path)


class KilledError(BaseException):
    """The process ends here: nothing that is done afterwards has an effect."""


class Steps:
    """Steps of `os` that change files: those from number `last` on are not done any more."""

    def __init__(self, last: int, end: Callable[[], None]) -> None:
        self.last, self.end, self.done = last, end, 0

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for name in STEPS:
            patch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            if self.done >= self.last:
                self.end()
            self.done += 1
            return call(*args, **options)

        return step


def raise_killed() -> None:
    raise KilledError


def save_until(number: int, state: msrnn.MultiState, path: Path) -> bool:
    """Save a state with the first steps alone -> whether these are all."""
    with pytest.MonkeyPatch.context() as patch:
        Steps(number, raise_killed).patch(patch)
        try:
            save(state, path, turn=2)
        except KilledError:
            return False
    return True


def save_until_killed(number: int, state: msrnn.MultiState, path: Path) -> bool:
    """The same in a process of its own, which is killed."""
    if (child := os.fork()) == 0:
        Steps(number, lambda: os.kill(os.getpid(), signal.SIGKILL)).patch(pytest.MonkeyPatch())
        save(state, path, turn=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


class RNNFiles:
    """The state files of an RNN."""

    def __init__(self, rnn: msrnn.MultiStateRNN) -> None:
        self.rnn = rnn

    def save(self, state: msrnn.MultiState, path: Path, notes: Mapping[str, Any]) -> None:
        state.save(path, dict(notes), segments_apart=True)

    def load(self, path: Path) -> msrnn.MultiState:
        return self.rnn.load_state(path)

    def describe(self, path: Path) -> dict[str, Any]:
        return load_description(path)


def check_every_end(save_until: Callable[[int, msrnn.MultiState, Path], bool], path: Path, other: bool) -> None:
    """After a write that ends at any step, the state before is there, or the new one, and nothing else.

    The new one continues the state before, or is one that has none of its segments (`other`).
    """
    rnn = recalling()
    folder = StateFolder(path.parent, RNNFiles(rnn))
    before = read(rnn, rnn.state(), 1100)
    save(before, path, turn=1)
    after = read(rnn, rnn.state() if other else rnn.load_state(path), 1000 + 1100 * other, seed=2)
    turns = []
    for number in count():
        finished = save_until(number, after.fork(1), path)
        if not finished:
            folder.remove_unfinished()
        turn = load_description(path)["notes"]["turn"]
        assert_equal(rnn, rnn.load_state(path), before if turn == 1 else after)
        named = {name for one in load_description(path)[SEGMENTS] for name, _ in one}
        assert {*segments(path)} == named
        assert {found.name for found in path.parent.iterdir()} == {path.name, "talk.archive"}
        turns.append(turn)
        if finished:
            break
        if turn == 2:
            save(before, path, turn=1)
        for archive in (archive for layer in after.layers for archive in layer.archives):
            for segment in archive.whole_segments()[0 if other else 1 :]:
                segment.file = None  # a process that was killed does not know what it has written
    assert turns == sorted(turns)
    assert turns.count(1) > 8
    assert turns.count(2) > 2


@pytest.mark.parametrize("other", [False, True])
def test_a_write_that_ends_at_any_step(path: Path, other: bool) -> None:
    check_every_end(save_until, path, other)


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_step(tmp_path: Path) -> None:
    """In a process with one thread, which may fork."""
    code = """
        import sys, torch
        from pathlib import Path
        torch.set_num_threads(1)
        from tests.core.test_segment_files import check_every_end, save_until_killed
        for other in (False, True):
            folder = Path(sys.argv[1]) / str(other)
            folder.mkdir()
            check_every_end(save_until_killed, folder / "talk.safetensors", other)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr


def test_a_second_process_that_starts_meanwhile(rnn: msrnn.MultiStateRNN, path: Path) -> None:
    """It removes what it takes for unfinished; then the write fails, and names no segment that is not there."""
    folder = StateFolder(path.parent, RNNFiles(rnn))
    before = read(rnn, rnn.state(), 1100)
    save(before, path, turn=1)
    after, ends = read(rnn, before.fork(1), 1000, seed=2), []
    for number in count():
        started: list[bool] = []

        def start(started: list[bool] = started) -> None:
            if not started:
                started.append(True)
                folder.remove_unfinished()

        with pytest.MonkeyPatch.context() as patch:
            Steps(number, start).patch(patch)
            try:
                save(after, path, turn=2)
                ends.append(True)
            except OSError:
                ends.append(False)
        turn = load_description(path)["notes"]["turn"]
        assert_equal(rnn, rnn.load_state(path), before if turn == 1 else after)
        assert turn == 2 or not ends[-1]
        if not started:
            break
        save(before, path, turn=1)
    assert ends.count(False) > 5


def test_a_write_that_fails_leaves_nothing(
    rnn: msrnn.MultiStateRNN, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, after the segments are written; the next write of the same state works."""
    before = read(rnn, rnn.state(), 1100)
    save(before, path)
    old, after = segments(path), read(rnn, before.fork(1), 1000)
    fsync = os.fsync
    for last in (0, 1, 2, 3):  # a segment, its folder, the state file
        calls = iter(range(100))

        def fail(descriptor: int, calls: Iterator[int] = calls, last: int = last) -> None:
            if next(calls) == last:
                raise OSError(28, "No space left on device")
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            if last < 3:
                with pytest.raises(OSError, match="No space left"):
                    save(after, path)
                assert segments(path) == old
                assert_equal(rnn, rnn.load_state(path), before)
            else:  # the state is there already
                save(after, path)
    assert_equal(rnn, rnn.load_state(path), after)
    assert len(segments(path)) == 2
