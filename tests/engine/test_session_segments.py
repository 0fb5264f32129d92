"""Sessions with long archives, in a folder: a turn writes what is new, and answers are those without a restart."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.engine.lanes import LongEngine
from msrnn.engine.requests import Request
from msrnn.engine.session_id import SessionId
from msrnn.errors import SessionError
from tests.helpers.tiny import build, llama, tokens

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
PARAMS = msrnn.SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
ANN, BOB = "a" * 16, "b" * 16
TURNS = (1100, 20, 940, 30)  # tokens; the third one fills a segment


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(2, 2, **SMALL)), "tova", 16, recall=8)


def text(length: int, seed: int = 1) -> list[int]:
    found: list[int] = tokens(1, length, seed)[0].tolist()
    return found


def engine_on(rnn: msrnn.MultiStateRNN, folder: Path | None, **options: Any) -> msrnn.Engine:
    return msrnn.Engine(rnn, slots=2, prefix_bytes=0, prefix_host_bytes=0, sessions=folder, **options)


def ask(engine: msrnn.Engine, prompt: Sequence[int], session: str = "talk", owner: str = "") -> Request:
    request = engine.request(prompt, PARAMS, session, owner=owner)
    engine.add(request)
    while not request.finished:
        engine.step()
    return request


def answer(engine: msrnn.Engine, prompt: Sequence[int], session: str = "talk", owner: str = "") -> list[int]:
    request = ask(engine, prompt, session, owner)
    assert request.answers[0].error is None
    return request.answers[0].tokens


def list_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """The number and the time of each file."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def count_bytes(folder: Path) -> int:
    """The bytes on the disk, links once."""
    return sum({path.stat().st_ino: path.stat().st_size for path in list_files(folder)}.values())


def test_a_turn_writes_what_is_new_and_answers_are_those_without_a_restart(
    rnn: msrnn.MultiStateRNN, tmp_path: Path
) -> None:
    """Each turn in an engine of its own; those before are not closed, as if they were killed."""
    uninterrupted, engines, row = engine_on(rnn, None), [], rnn.spec.archived_row_nbytes
    for turn, length in enumerate(TURNS):
        before = list_files(tmp_path)
        engines.append(engine_on(rnn, tmp_path))
        prompt = text(length, turn)
        assert answer(engines[-1], prompt) == answer(uninterrupted, prompt)
        after = list_files(tmp_path)
        written = sum(path.stat().st_size for path in after.keys() - {p for p in before if before[p] == after.get(p)})
        assert engines[-1].sessions.nbytes == count_bytes(tmp_path) > sum(TURNS[: turn + 1]) * row
        if turn:
            assert written < (1024 + 20) * row + 2 * rnn.state().nbytes
        if turn in (1, 3):
            assert [path.name for path in after if after[path] != before.get(path)] == ["talk.safetensors"]
    for engine in engines:
        engine.close()


def test_turns_of_one_engine(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    """Its session is in memory meanwhile, and is not read from files."""
    uninterrupted, engine = engine_on(rnn, None), engine_on(rnn, tmp_path)
    for turn, length in enumerate(TURNS):
        before = list_files(tmp_path)
        prompt = text(length, turn)
        assert answer(engine, prompt) == answer(uninterrupted, prompt)
        changed = [path for path, written in before.items() if list_files(tmp_path).get(path) != written]
        assert [path.name for path in changed] == ["talk.safetensors"] * bool(turn)
    engine.close()


def test_forks_share_their_files(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    uninterrupted, engine = engine_on(rnn, None), engine_on(rnn, tmp_path)
    for one in (uninterrupted, engine):
        answer(one, text(1100))
        one.sessions.fork("talk", "fork")
    segments = [*tmp_path.glob("*.archive/*")]
    assert len(segments) == 2
    assert {path.stat().st_nlink for path in segments} == {2}
    for name in ("fork", "talk"):
        prompt = text(950 if name == "fork" else 10, len(name))
        assert answer(engine, prompt, name) == answer(uninterrupted, prompt, name)
        assert engine.sessions.nbytes == count_bytes(tmp_path)
    engine.close()
    engine = engine_on(rnn, tmp_path)  # a restart
    assert engine.sessions.nbytes == count_bytes(tmp_path)
    assert engine.sessions.nbytes < sum(info.nbytes for info in engine.sessions.infos())
    engine.sessions.delete("talk")
    assert engine.sessions.nbytes == count_bytes(tmp_path)
    assert {path.stat().st_nlink for path in tmp_path.glob("*.archive/*")} == {1}
    assert answer(engine, text(9), "fork") == answer(uninterrupted, text(9), "fork")
    engine.sessions.delete("fork")
    assert (engine.sessions.nbytes, [*tmp_path.iterdir()]) == (0, [])
    engine.close()


def test_the_limit_counts_shared_files_once(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    engine = engine_on(rnn, tmp_path)
    answer(engine, text(1100), "a")
    alone, own = engine.sessions.nbytes, (tmp_path / "a.safetensors").stat().st_size
    engine.close()
    engine = engine_on(rnn, tmp_path, session_bytes=alone + 3 * own)
    for name in "bcd":
        engine.sessions.fork("a", name)
    assert {info.name for info in engine.sessions.infos()} == {*"abcd"}
    assert engine.sessions.nbytes == count_bytes(tmp_path) <= alone + 3 * own
    assert all(info.nbytes == alone for info in engine.sessions.infos())
    # A session of its own has room only when all of them are deleted, since they share what is large.
    answer(engine, text(1090, 2), "e")
    assert [info.name for info in engine.sessions.infos()] == ["e"]
    assert engine.sessions.nbytes == count_bytes(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"e.safetensors", "e.archive"}
    engine.close()


def test_a_session_that_does_not_fit_deletes_no_forks(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    """Deleting one that shares its segments with a session in use would free hardly anything."""
    engine = engine_on(rnn, tmp_path)
    answer(engine, text(1100), "a")
    engine.sessions.fork("a", "b")
    engine.sessions._most = engine.sessions.nbytes + 1000
    engine.sessions.begin(SessionId("a"), 0)
    refused = ask(engine, text(900, 2), "c")
    assert refused.answers[0].error_code == "session_storage_full"
    assert {info.name for info in engine.sessions.infos()} == {"a", "b"}
    engine.close()


def test_owners_share_nothing(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    engine = engine_on(rnn, tmp_path)
    for owner in (ANN, BOB):
        answer(engine, text(1100), owner=owner)
    segments = [*tmp_path.rglob("*.archive/*")]
    assert {path.parent.parent.name for path in segments} == {ANN, BOB}
    assert {path.stat().st_nlink for path in segments} == {1}
    engine.sessions.delete(SessionId("talk", ANN))
    assert [path.parent.parent.name for path in tmp_path.rglob("*.archive/*")] == [BOB]
    engine.close()


def test_a_file_with_its_whole_archive_is_continued(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    """As files of earlier versions are."""
    uninterrupted, engine = engine_on(rnn, None), engine_on(rnn, tmp_path)
    for one in (uninterrupted, engine):
        answer(one, text(1100))
    engine.close()
    path = tmp_path / "talk.safetensors"
    notes = engine.executor.describe(path)["notes"]
    state = rnn.load_state(path)
    engine.sessions.delete("talk")
    state.save(path, notes)
    assert [*tmp_path.iterdir()] == [path]
    engine = engine_on(rnn, tmp_path)
    assert answer(engine, text(7)) == answer(uninterrupted, text(7))
    assert len([*tmp_path.glob("talk.archive/*")]) == 1
    assert path.stat().st_size < 200 * rnn.spec.archived_row_nbytes
    engine.close()


def test_a_missing_segment_is_logged_by_name(
    rnn: msrnn.MultiStateRNN, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients do not see it. In memory, the session goes on, and the segment is written again."""
    engine, uninterrupted = engine_on(rnn, tmp_path), engine_on(rnn, None)
    for one in (engine, uninterrupted):
        answer(one, text(1100))
    (segment,) = tmp_path.glob("talk.archive/*")
    segment.unlink()
    other = engine_on(rnn, tmp_path)
    with caplog.at_level(logging.WARNING):
        refused = ask(other, text(5)).answers[0].error
    assert "its file is damaged" in str(refused)
    assert segment.name not in str(refused)
    assert f"{segment}: a segment of an archive is missing" in caplog.text
    assert answer(engine, text(5)) == answer(uninterrupted, text(5))
    for one in (engine, other):
        one.close()
    again = engine_on(rnn, tmp_path)
    assert answer(again, text(6)) == answer(uninterrupted, text(6))
    again.close()


def test_what_a_killed_server_has_left_is_removed(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    engine = engine_on(rnn, tmp_path)
    for name in ("talk", "gone", "theirs"):
        answer(engine, text(1100), name)
    engine.close()
    (left,) = tmp_path.glob("gone.archive/*")
    (tmp_path / "gone.safetensors").unlink()  # it was deleted, and its segments not yet
    (tmp_path / "theirs.safetensors").unlink()
    (tmp_path / "talk.archive" / left.name).hardlink_to(left)  # it was written, and its state not yet
    engine = engine_on(rnn, tmp_path, owns_session=lambda name: name != "theirs")
    assert engine.sessions.turns("talk") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"talk.safetensors", "talk.archive", "theirs.archive"}
    assert len([*tmp_path.glob("talk.archive/*")]) == 1
    assert answer(engine, text(5))
    engine.close()


def test_a_damaged_file_is_set_aside_with_its_segments(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    engine = engine_on(rnn, tmp_path)
    answer(engine, text(1100))
    engine.close()
    path = tmp_path / "talk.safetensors"
    sound = path.read_bytes()
    path.write_bytes(sound[:100])
    engine = engine_on(rnn, tmp_path)
    assert {found.name for found in tmp_path.iterdir()} == {"talk.safetensors.damaged", "talk.archive.damaged"}
    answer(engine, text(1100))  # a new session of the name
    engine.close()
    assert len([*tmp_path.glob("*/*")]) == 2


def test_a_session_of_another_engine_is_forked(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    """Replicas share a folder. A fork links what the other one has written."""
    uninterrupted = engine_on(rnn, None)
    engines = {name: engine_on(rnn, tmp_path, owns_session=lambda n, own=name: n == own) for name in ("a", "b")}
    for one in (uninterrupted, engines["a"]):
        answer(one, text(1100), "a")
    for one in (uninterrupted, engines["b"]):
        one.sessions.fork("a", "b")
    assert {path.stat().st_nlink for path in tmp_path.glob("*.archive/*")} == {2}
    engines["a"].sessions.delete("a")
    assert answer(engines["b"], text(5), "b") == answer(uninterrupted, text(5), "b")
    with pytest.raises(SessionError, match="belongs to another engine"):
        engines["a"].sessions.delete("b")
    for engine in engines.values():
        engine.close()


def test_a_session_that_becomes_long(tmp_path: Path) -> None:
    """Its state is converted, and so are its archived keys: their files are replaced."""
    model = build(llama(2, 2, **SMALL))
    short = msrnn.MultiStateRNN(model, "tova", 16, recall=8)
    long = msrnn.MultiStateRNN(model, "tova+1~40", 16, positions="compressed", recall=8)
    found = []
    for folder in (None, tmp_path):
        engine = LongEngine(short, long, 1200, slots=4, sessions=folder)
        found.append([answer(engine, text(length, length)) for length in (1100, 90)])
        before = [*tmp_path.glob("*.archive/*")]
        engine.close()
        engine = LongEngine(short, long, 1200, slots=4, sessions=folder) if folder else engine
        found[-1].append(answer(engine, text(900)))
        assert engine.long_requests >= 1
        engine.close()
        assert not {*before} & {*tmp_path.glob("*.archive/*")}
    assert found[0] == found[1]
    assert len(before) == 1
    assert len([*tmp_path.glob("*.archive/*")]) == 2


def test_cached_prefixes_share_segments(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    """Two prompts begin with one document; the second one's prefix has its segments, and those that follow."""
    document = text(1200)
    prompts = [[*document, *text(100, 2)], [*document, *text(1000, 3)], [*document, *text(1000, 3), *text(80, 4)]]
    alone = msrnn.Engine(rnn, slots=2).generate(prompts, PARAMS, progress=False)
    options: Any = {"slots": 2, "prefix_bytes": 0, "prefix_host_bytes": 0, "prefix_folder": tmp_path}
    for _ in range(2):  # and after a restart
        engine = msrnn.Engine(rnn, **options)
        for prompt, expected in zip(prompts, alone, strict=True):
            (request,) = engine.generate([prompt], PARAMS, progress=False)
            assert request.answers[0].tokens == expected.answers[0].tokens
            engine.writer.submit(lambda: None).result()
            assert engine.prefixes.files is not None
            assert engine.prefixes.files.nbytes == count_bytes(tmp_path)
        assert request.cached_tokens > 2000
        engine.close()
    assert max(path.stat().st_nlink for path in tmp_path.glob("*.archive/*")) >= 2
    small = msrnn.Engine(rnn, **options, prefix_disk_bytes=1)
    assert [*tmp_path.iterdir()] == []
    small.close()
