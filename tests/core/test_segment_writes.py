"""Writes of segments that end at any step, in a process that fails, is killed or is not alone: no state is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.core.segment_folder import SEGMENTS
from msrnn.core.state_file import load_description
from msrnn.core.state_folder import StateFolder
from tests.helpers.segmented import assert_equal, read, recalling, save, segments

STEPS = ("mkdir", "link", "fsync", "replace", "rename", "unlink", "rmdir", "chmod")  # of `os`, where a write may end


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return recalling()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "talk.safetensors"


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
        from tests.core.test_segment_writes import check_every_end, save_until_killed
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
