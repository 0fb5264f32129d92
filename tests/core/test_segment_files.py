"""Segments in files of their own: a state is the same, the next write is small, and damaged files are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as to_bytes

import msrnn
from msrnn.core.segment_folder import SEGMENTS, find_folder
from msrnn.core.state_file import checksum, load_description, load_tensors
from msrnn.errors import FileError
from msrnn.recall import Recall
from tests.helpers.segmented import assert_equal, read, recalling, save, segments


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


@pytest.mark.parametrize(
    "join",
    [
        lambda state, _: state.fork(2),
        lambda state, _: state.select([0, 0]),
        lambda state, other: msrnn.MultiState.cat([state, other, state.fork(1)]),
    ],
    ids=["fork", "select", "cat"],
)
def test_sequences_of_a_batch_share_files(
    join: Callable[..., msrnn.MultiState],
    rnn: msrnn.MultiStateRNN,
    long: msrnn.MultiState,
    path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = join(long.fork(1), read(rnn, rnn.state(), 1100, seed=8))
    save(state, path)
    before = segments(path)
    assert len(before) == len({one for archive in state.layers[0].archives for one in archive.whole_segments()})
    loaded = rnn.load_state(path)
    first, *_, last = (archive.whole_segments() for archive in loaded.layers[0].archives)
    assert first == last  # in memory too
    assert_equal(rnn, loaded, state)
    for own in (loaded, state):
        read(rnn, own, 1000, seed=4)  # each sequence fills a segment of its own
    assert_equal(rnn, loaded, state)
    save(loaded, path)
    assert_equal(rnn, rnn.load_state(path), state)
    assert len(segments(path)) == len(before) + state.batch_size
    assert not caplog.records


def test_a_damaged_file_of_several_sequences_is_refused(
    rnn: msrnn.MultiStateRNN, long: msrnn.MultiState, path: Path
) -> None:
    save(long.fork(2), path)
    saved, description = load_tensors(path)
    tensors = {name: tensor.clone() for name, tensor in saved.items()}
    own = description[SEGMENTS][0]
    for second, message in (
        (own[::-1], "tokens from 0 on"),
        (own[:1], "positions 0 to 1,076, and 2,100 tokens were read"),
        ([own[0], own[0]], "must be the name and the bytes of a segment"),
        ([[own[0][0], 7], own[1]], "bytes, not 7"),
    ):
        path.write_bytes(to_bytes(tensors, {"msrnn": json.dumps({**description, SEGMENTS: [own, second]})}))
        with pytest.raises(FileError, match=message):
            rnn.load_state(path)
    path.write_bytes(to_bytes(tensors, {"msrnn": json.dumps(description)}))
    flip(find_folder(path) / max(segments(path)))
    with pytest.raises(FileError, match="do not match its checksum"):
        rnn.load_state(path)


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


def test_a_whole_file_in_place_of_one_with_segments_removes_them(
    rnn: msrnn.MultiStateRNN, long: msrnn.MultiState, path: Path
) -> None:
    save(long, path)
    assert segments(path)
    other = path.with_name(path.stem)  # has no segments, and is not the owner of that folder
    long.save(other)
    assert segments(path)
    long.save(path)
    assert not segments(path)
    for file in (path, other):
        assert_equal(rnn, rnn.load_state(file), long)


def test_a_name_whose_folder_may_be_anothers_is_refused(long: msrnn.MultiState, path: Path) -> None:
    save(long, path)
    before = segments(path)
    with pytest.raises(FileError, match=r"ends in \.safetensors"):
        save(long, path.with_name(path.stem))
    assert segments(path) == before
