"""Kept states in files: bounded, exact after a restart, and never wrong, whatever is in the folder."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.engine.local_executor import LocalExecutor, LocalState
from msrnn.engine.prefix_cache_files import PrefixCacheFiles, _keys
from msrnn.engine.writer import Writer
from tests.helpers.tiny import build, llama

GREEDY = msrnn.SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)


def engine_on(rnn: msrnn.MultiStateRNN, folder: Path, **options: Any) -> msrnn.Engine:
    """Without memory for kept states: all of them are in files."""
    return msrnn.Engine(rnn, slots=2, prefix_bytes=0, prefix_host_bytes=0, prefix_folder=folder, **options)


def answered(engine: msrnn.Engine, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Answers and kept tokens; one prompt after the other, and what it leaves is on disk before the next."""
    found = []
    for prompt in prompts:
        (request,) = engine.generate([prompt], GREEDY)
        engine.close()
        found.append((request.answers[0].tokens, request.cached_tokens))
    return found


def histories(count: int, turns: int = 3) -> list[list[int]]:
    """Conversations that grow, one after the other."""
    draw, found = random.Random(3), []
    for _ in range(count):
        history: list[int] = []
        for _ in range(turns):
            history = [*history, *(draw.randrange(3, 97) for _ in range(draw.randint(5, 30)))]
            found.append(history)
    return found


def plain(rnn: msrnn.MultiStateRNN, prompts: list[list[int]]) -> list[list[int]]:
    engine = msrnn.Engine(rnn, slots=2, prefix_bytes=0, prefix_host_bytes=0)
    return [request.answers[0].tokens for request in engine.generate(prompts, GREEDY)]


def test_states_that_leave_memory_are_read_again_also_after_a_restart(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    prompts = histories(4)
    found = answered(engine_on(rnn, tmp_path), prompts)
    assert [answer for answer, _ in found] == plain(rnn, prompts)
    assert [kept for _, kept in found] == [0 if i % 3 == 0 else len(prompts[i - 1]) for i in range(len(prompts))]
    longer = [[*prompt, 5] for prompt in prompts]
    again = engine_on(rnn, tmp_path)
    found = answered(again, longer)
    assert [answer for answer, _ in found] == plain(rnn, longer)
    assert [kept for _, kept in found] == [len(prompt) for prompt in prompts]
    assert again.prefixes.files is not None
    assert (again.prefixes.hits, again.prefixes.files.hits) == (12, 12)


def test_what_fits_into_memory_stays_there(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    engine = msrnn.Engine(rnn, slots=2, prefix_bytes=2**24, prefix_folder=tmp_path)
    answered(engine, histories(2))
    assert (len(engine.prefixes), [*tmp_path.iterdir()]) == (12, [])


def test_the_disk_is_bounded_and_the_least_recently_used_goes_first(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    executor, writer = LocalExecutor(rnn, 1), Writer()
    state = executor.new_state()
    executor.read(state, [5, 6])

    def put(files: PrefixCacheFiles, first: int) -> None:
        files.put("", (first, 6), state)
        writer.close()

    files = PrefixCacheFiles(executor, tmp_path, 2**30, writer)
    for first in (10, 11, 12):
        put(files, first)
    one = files.nbytes // 3
    assert files.find_longest("", [10, 6, 7], 0)
    files = PrefixCacheFiles(executor, tmp_path, 3 * one + 100, writer)  # after a restart
    put(files, 13)
    for first in (10, 12):
        assert files.find_longest("", [first, 6, 7], 0)
    put(files, 14)
    assert [first for first in range(9, 16) if files.find_longest("", [first, 6, 7], 0)] == [10, 12, 14]
    assert len([*tmp_path.iterdir()]) == len(files) == 3
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == files.nbytes
    smaller = PrefixCacheFiles(executor, tmp_path, one, writer)
    assert (len(smaller), len([*tmp_path.iterdir()])) == (1, 1)
    assert smaller.find_longest("", [14, 6, 7], 0)
    assert smaller.find_longest("", [14, 6, 7], 2) is None
    assert smaller.find_longest("", [14, 6], 0) is None  # its logits are not in the file


def damaged(name: str, path: Path, other: Path) -> None:
    content = path.read_bytes()
    if name == "truncated":
        path.write_bytes(content[:-30])
    elif name == "empty":
        path.write_bytes(b"")
    elif name == "value":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif name == "tokens":  # other tokens than those that its name says
        place = content.index(b"tokens") + content[content.index(b"tokens") :].index(b"[") + 1
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif name == "another":
        shutil.copy(other, path)
    elif name == "gone":
        path.unlink()


def names(prompts: list[list[int]]) -> set[str]:
    keys = [_keys("", prompt, {len(prompt)})[0] for prompt in prompts]
    return {f"{key.name}.safetensors" for key in keys}


@pytest.mark.parametrize("damage", ["truncated", "empty", "value", "tokens", "another", "gone"])
def test_damaged_files_are_removed_and_never_used(rnn: msrnn.MultiStateRNN, tmp_path: Path, damage: str) -> None:
    prompts = histories(1)
    answered(engine_on(rnn, tmp_path), prompts)
    engine, files = engine_on(rnn, tmp_path), sorted(tmp_path.iterdir())
    copy = Path(shutil.copy(files[0], tmp_path.parent / f"{damage}.copy"))
    for path in files:
        damaged(damage, path, copy if path != files[0] else files[1])
    longer = [[*prompt, 5] for prompt in prompts]
    found = answered(engine, longer)
    assert [answer for answer, _ in found] == plain(rnn, longer)
    assert {kept for _, kept in found} == {0}
    assert not names(prompts) & {path.name for path in tmp_path.iterdir()}


def test_files_of_another_model_are_removed_and_other_files_stay(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    prompts = histories(1)
    answered(engine_on(rnn, tmp_path), prompts)
    assert names(prompts) <= {path.name for path in tmp_path.iterdir()}
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / f".{min(names(prompts))}.x1y2.tmp").mkdir()
    other = msrnn.MultiStateRNN(build(llama(), "cpu", seed=1), "tova", 9)
    longer = [[*prompt, 5] for prompt in prompts]
    found = answered(engine_on(other, tmp_path), longer)
    assert [answer for answer, _ in found] == plain(other, longer)
    left = {path.name for path in tmp_path.iterdir()}
    assert "model.safetensors" in left
    assert not any(name.endswith(".tmp") for name in left)
    assert not names(prompts) & left


def test_writes_do_not_stop_the_engine(
    rnn: msrnn.MultiStateRNN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they pile up: what would wait long is forgotten."""
    allowed, save = threading.Event(), msrnn.MultiState.save

    def slow(*args: Any, **how: Any) -> None:
        assert allowed.wait(30)
        save(*args, **how)

    monkeypatch.setattr(msrnn.MultiState, "save", slow)
    engine, prompts = engine_on(rnn, tmp_path), histories(3)
    found = [request.answers[0].tokens for request in engine.generate(prompts, GREEDY)]
    assert (found, [*tmp_path.iterdir()]) == (plain(rnn, prompts), [])
    allowed.set()
    engine.close()
    assert len([*tmp_path.iterdir()]) == 2


def test_a_full_disk_is_counted(rnn: msrnn.MultiStateRNN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **how: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(msrnn.MultiState, "save", full)
    engine, prompts = engine_on(rnn, tmp_path), histories(1)
    assert [answer for answer, _ in answered(engine, prompts)] == plain(rnn, prompts)
    assert engine.prefixes.files is not None
    assert engine.prefixes.files.errors > 2


def test_a_file_that_is_deleted_while_it_is_read(
    rnn: msrnn.MultiStateRNN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread writes, and makes room; nothing is left of the file then."""
    executor, writer = LocalExecutor(rnn, 1), Writer()
    state = executor.new_state()
    executor.read(state, [5, 6])

    load = executor.load

    def load_and_forget(path: Path) -> LocalState:
        files._folder._names.clear()
        return load(path)

    monkeypatch.setattr(executor, "load", load_and_forget)
    files = PrefixCacheFiles(executor, tmp_path, 2**30, writer)
    files.put("", [5, 6], state)
    writer.close()
    assert files.find_longest("", [5, 6, 7], 0) is not None
    assert len(files) == 0


def test_files_keep_their_names(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    """Files of earlier versions are found: their names and notes must not change."""
    executor, writer = LocalExecutor(rnn, 1), Writer()
    state = executor.new_state()
    executor.read(state, [5, 6])
    digest = "493630ab4b4b7f42305ac0ec0a28cc67967dc24e9fba10b1c7b058f028a35b45"
    executor.save(state, tmp_path / f"2-{digest}.safetensors", {"tokens": [5, 6]})
    found = PrefixCacheFiles(executor, tmp_path, 2**30, writer).find_longest("", [5, 6, 7], 0)
    assert found is not None
    assert (found[0], found[1].seen) == ([5, 6], 2)
