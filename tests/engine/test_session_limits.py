"""Sessions of different owners, in bounded memory or a bounded folder, and files that are damaged."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import msrnn
from msrnn.engine.local_executor import LocalExecutor
from msrnn.engine.requests import Request
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import DAY, Sessions
from msrnn.errors import SessionError
from msrnn.server.affinity import assign_replica
from tests.helpers.tiny import build, llama

GREEDY = msrnn.SamplingParams(temperature=0, max_tokens=4)
ANN, BOB = "a" * 16, "b" * 16


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)


@pytest.fixture
def executor(rnn: msrnn.MultiStateRNN) -> LocalExecutor:
    return LocalExecutor(rnn, 1)


def ask(engine: msrnn.Engine, prompt: list[int], session: str, owner: str = "") -> Request:
    request = engine.request(prompt, GREEDY, session, owner=owner)
    engine.add(request)
    while not engine.idle:
        engine.step()
    return request


@pytest.mark.parametrize("folder", [False, True])
def test_owners_have_sessions_of_their_own(rnn: msrnn.MultiStateRNN, tmp_path: Path, folder: bool) -> None:
    def engine() -> msrnn.Engine:
        return msrnn.Engine(rnn, slots=2, sessions=tmp_path if folder else None)

    one = engine()
    alone = [ask(one, prompt, "talk", ANN).answers[0].tokens for prompt in ([5, 6, 7], [8])]
    assert one.sessions.infos(BOB) == one.sessions.infos() == []
    assert SessionId("talk", BOB) not in one.sessions
    assert ask(one, [5, 6, 7], "talk", BOB).answers[0].tokens == alone[0]  # a first turn, although Ann had two
    one = engine() if folder else one
    assert [info.turns for info in one.sessions.infos(ANN)] == [2]
    assert [info.turns for info in one.sessions.infos(BOB)] == [1]
    assert ask(one, [8], "talk", BOB).answers[0].tokens == alone[1]
    one.sessions.delete(SessionId("talk", BOB))
    assert [info.name for info in one.sessions.infos(ANN)] == ["talk"]


def test_names_that_differ_by_case_have_files_that_do_not(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    engine = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    for name in ("talk", "Talk", "TALK"):
        ask(engine, [5, 6], name)
    files = [path.name for path in tmp_path.iterdir()]
    assert len({name.lower() for name in files}) == 3
    again = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    assert {info.name for info in again.sessions.infos()} == {"talk", "Talk", "TALK"}


def test_a_file_that_is_named_as_its_session_is_found(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    """Files were, before."""
    engine = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    ask(engine, [5, 6], "Talk")
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "Talk.safetensors")
    again = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    ask(again, [7], "Talk")
    assert again.sessions.turns("Talk") == 2
    assert [path.name for path in tmp_path.glob("*talk*")] == ["=talk.safetensors"]


def rewrite(path: Path, **changes: Any) -> None:
    """Change the description of a state file; its tensors stay as they are."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        description = json.loads(file.metadata()["msrnn"])
    notes = {**description["notes"], **changes.pop("notes", {})}
    save_file(tensors, path, metadata={"msrnn": json.dumps({**description, "notes": notes, **changes})})


DAMAGES: dict[str, Any] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "empty": lambda path: path.write_bytes(b""),
    "another header": lambda path: save_file({}, path, metadata={"msrnn": "[" * 5000}),
    "no notes": lambda path: save_file({}, path, metadata={"msrnn": "{}"}),
    "infinite": lambda path: rewrite(path, notes={"created": float("inf")}),
    "not a number": lambda path: rewrite(path, notes={"updated": float("nan")}),
    "far future": lambda path: rewrite(path, notes={"updated": 1e300}),
    "words": lambda path: rewrite(path, notes={"created": "today"}),
    "unread": lambda path: rewrite(path, notes={"unread": {"a": 1}}),
    "last": lambda path: rewrite(path, notes={"last": "x"}),
    "large token": lambda path: rewrite(path, notes={"unread": [10**400]}),
    "turns": lambda path: rewrite(path, notes={"turns": -1}),
    "columns": lambda path: rewrite(path, columns=["x"]),
    "no columns": lambda path: rewrite(path, columns=[]),
    "columns of another kind": lambda path: rewrite(path, columns=7),
    "a newer format": lambda path: rewrite(path, format=99),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_set_aside(
    rnn: msrnn.MultiStateRNN, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    for name in ("sound", "damaged"):
        ask(engine, [5, 6], name)
    DAMAGES[damage](tmp_path / "damaged.safetensors")
    with caplog.at_level(logging.WARNING):
        again = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    assert "damaged.safetensors" in caplog.text
    assert [info.name for info in again.sessions.infos()] == ["sound"]
    assert {path.name for path in tmp_path.iterdir()} == {"sound.safetensors", "damaged.safetensors.damaged"}
    assert ask(again, [7], "sound").answers[0].finish_reason != "error"
    assert ask(again, [7], "damaged").answers[0].finish_reason != "error"  # a new one


@pytest.mark.parametrize("folder", [False, True])
def test_the_least_recently_used_session_is_deleted_first(
    executor: LocalExecutor, tmp_path: Path, folder: bool
) -> None:
    state = executor.new_state()
    where = tmp_path if folder else None
    size = Sessions(executor, where)
    size.put("probe", state, []).result()
    one = size.nbytes
    size.delete("probe")
    sessions = Sessions(executor, where, most=2 * one + 100)
    for name in ("a", "b", "a", "c"):
        sessions.put(name, state, []).result()
    assert [info.name for info in sessions.infos()] == ["c", "a"]
    assert dict(sessions.evicted) == {"bytes": 1, "days": 0}
    assert sessions.nbytes <= 2 * one + 100
    if folder:
        assert {path.stem for path in tmp_path.iterdir()} == {"a", "c"}
        assert [info.name for info in Sessions(executor, where, most=one + 50).infos()] == ["c"]


def test_the_owner_with_most_sessions_loses_one(executor: LocalExecutor) -> None:
    """So that nobody deletes the sessions of others by making many."""
    state = executor.new_state()
    sessions = Sessions(executor, most=4 * state.nbytes)
    sessions.put(SessionId("old", ANN), state, [])
    for number in range(20):
        sessions.put(SessionId(f"s{number}", BOB), state, [])
    assert [info.name for info in sessions.infos(ANN)] == ["old"]
    assert [info.name for info in sessions.infos(BOB)] == ["s19", "s18", "s17"]


def test_turns_under_way_count_for_their_owner(executor: LocalExecutor) -> None:
    """Or first turns that are cancelled later would push out what others have."""
    state = executor.new_state()
    sessions = Sessions(executor, most=5 * state.nbytes)
    for name in ("one", "two"):
        sessions.put(SessionId(name, ANN), state, [])
    sessions.put(SessionId("mine", BOB), state, [])
    for number in range(3):
        sessions.begin(SessionId(f"s{number}", BOB), state.nbytes)
    assert len(sessions.infos(ANN)) == 2
    assert sessions.infos(BOB) == []


def test_a_session_that_is_refused_deletes_nothing(executor: LocalExecutor) -> None:
    state = executor.new_state()
    sessions = Sessions(executor, most=3 * state.nbytes)
    for name in ("one", "two"):
        sessions.put(SessionId(name, ANN), state, [])
    sessions.begin(SessionId("one", ANN), state.nbytes)
    with pytest.raises(SessionError, match="do not fit") as error:
        sessions.begin(SessionId("large", BOB), 3 * state.nbytes)
    assert error.value.code == "session_storage_full"
    assert len(sessions.infos(ANN)) == 2


def test_a_fork_does_not_delete_what_it_is_made_from(executor: LocalExecutor) -> None:
    state = executor.new_state()
    sessions = Sessions(executor, most=2 * state.nbytes)
    for name in ("old", "new"):
        sessions.put(name, state, [])
    sessions.fork("old", "copy")
    assert {info.name for info in sessions.infos()} == {"old", "copy"}


def test_a_session_that_cannot_be_deleted_stops_nobody(
    executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state, now = executor.new_state(), time.time()
    sessions = Sessions(executor, tmp_path, days=1)
    sessions.put("old", state, []).result()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("msrnn.engine.session_files.SessionFiles.delete", refuse)
    monkeypatch.setattr("msrnn.engine.sessions.time.time", lambda: now + 3 * DAY)
    sessions.put("new", state, []).result()
    assert {info.name for info in sessions.infos()} == {"old", "new"}
    assert "session 'old' cannot be deleted" in caplog.text


def test_a_file_that_is_damaged_while_its_session_is_in_memory(
    rnn: msrnn.MultiStateRNN, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next turn takes its place."""
    engine = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    expected = [ask(msrnn.Engine(rnn, slots=2), prompt, "talk") for prompt in ([5, 6],)]
    assert ask(engine, [5, 6], "talk").answers[0].tokens == expected[0].answers[0].tokens
    (tmp_path / "talk.safetensors").write_bytes(b"damaged")
    assert ask(engine, [7], "talk").answers[0].finish_reason in ("stop", "length")
    assert msrnn.Engine(rnn, slots=2, sessions=tmp_path).sessions.turns("talk") == 2
    assert (tmp_path / "talk.safetensors.damaged").read_bytes() == b"damaged"
    assert "talk.safetensors" in caplog.text


def test_a_file_with_any_name(executor: LocalExecutor, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.safetensors")).write_bytes(b"")
    for number in range(2):  # of two replicas, one puts it aside
        Sessions(executor, tmp_path, owns=lambda name, number=number: assign_replica(name, 2) == number)  # type: ignore[misc]
    assert [path.name for path in tmp_path.iterdir()] == [os.fsdecode(b"\xff.safetensors.damaged")]


def test_a_file_that_cannot_be_read_now_stays(
    rnn: msrnn.MultiStateRNN, executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error may pass: too many open files, for example."""
    ask(msrnn.Engine(rnn, slots=2, sessions=tmp_path), [5, 6], "talk")

    def fail(_: Path) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "describe", fail)
        assert len(Sessions(executor, tmp_path)) == 0
    assert Sessions(executor, tmp_path).turns("talk") == 1


def test_a_session_that_does_not_fit_is_refused_before_its_prompt_is_read(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=3, session_bytes=2 * rnn.state().nbytes)
    for name in ("a", "b"):
        engine.add(engine.request([5, 6], msrnn.SamplingParams(max_tokens=20, ignore_eos=True), name))
    engine.step()
    refused = engine.request([5, 6], GREEDY, "c")
    engine.add(refused)
    engine.step()
    assert refused.answers[0].error_code == "session_storage_full"
    assert not refused.answers[0].tokens
    while not engine.idle:
        engine.step()
    assert {info.name for info in engine.sessions.infos()} == {"a", "b"}
    ask(engine, [5], "c")  # now one is idle
    assert len(engine.sessions) == 2
    assert "c" in engine.sessions


def test_idle_sessions_expire(executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, now = executor.new_state(), time.time()
    sessions = Sessions(executor, tmp_path, days=2)
    for day, name in enumerate(("first", "second", "third")):
        monkeypatch.setattr("msrnn.engine.sessions.time.time", lambda day=day: now + day * DAY)
        sessions.put(name, state, []).result()
    sessions.begin(SessionId("second"), state.nbytes)
    monkeypatch.setattr("msrnn.engine.sessions.time.time", lambda: now + 3.5 * DAY)
    assert [info.name for info in sessions.infos()] == ["third", "second"]  # one is in use
    sessions.end(SessionId("second"))
    monkeypatch.setattr("msrnn.engine.sessions.time.time", lambda: now + 3.6 * DAY)
    assert [info.name for info in sessions.infos()] == ["third"]
    assert dict(sessions.evicted) == {"bytes": 0, "days": 2}
    assert [path.stem for path in tmp_path.iterdir()] == ["third"]


def test_a_turn_that_follows_another_one_than_expected_is_not_stored(executor: LocalExecutor) -> None:
    sessions = Sessions(executor)
    sessions.put("talk", executor.new_state(), [], follows=(0, None))
    created = sessions.infos()[0].created
    for other in ((0, None), (1, created - 1), (2, created)):
        with pytest.raises(SessionError, match="another turn has taken the place"):
            sessions.put("talk", executor.new_state(), [], follows=other)
    sessions.put("talk", executor.new_state(), [], follows=(1, created))
    assert sessions.turns("talk") == 2


def test_a_prompt_does_not_go_on_with_another_session_of_the_same_name(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    for name in ("a", "b"):
        ask(engine, [5, 6, 7], name)
    waiting = engine.request([8], GREEDY, "a")
    engine.sessions.delete("a")
    engine.sessions.fork("b", "a")  # with as many turns
    engine.add(waiting)
    while not engine.idle:
        engine.step()
    assert "has changed since" in str(waiting.answers[0].error)
    assert engine.sessions.turns("a") == 1


def test_a_session_in_use_is_not_deleted(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    ask(engine, [5, 6, 7], "talk")
    request = engine.request([8], GREEDY, "talk")
    engine.add(request)
    engine.step()
    with pytest.raises(SessionError, match="'talk': is answering a request"):
        engine.sessions.delete("talk")
    while not engine.idle:
        engine.step()
    assert engine.sessions.turns("talk") == 2


def test_a_fork_does_not_take_the_name_of_a_first_turn(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    ask(engine, [5, 6, 7], "talk")
    first = engine.request([8, 9], GREEDY, "other")
    engine.add(first)
    engine.step()
    with pytest.raises(SessionError, match="'other': is answering its first request"):
        engine.sessions.fork("talk", "other")
    while not engine.idle:
        engine.step()
    assert first.answers[0].finish_reason in ("stop", "length")
    assert engine.sessions.info("other").tokens == 2 + len(first.answers[0].tokens) + (  # type: ignore[union-attr]
        first.answers[0].finish_reason == "stop"
    )


def test_files_keep_their_names_and_notes(executor: LocalExecutor, tmp_path: Path) -> None:
    """Sessions of earlier versions are found: their files must not change."""
    state, folder = executor.new_state(), tmp_path / "0123456789abcdef"
    executor.read(state, [5, 6])
    folder.mkdir()
    notes: dict[str, Any] = {"unread": [7], "turns": 3, "created": 1.5, "updated": 2.5}
    executor.save(state, tmp_path / "=talk.safetensors", notes)
    executor.save(state, folder / "talk.safetensors", {**notes, "last": 8})
    sessions = Sessions(executor, tmp_path)
    assert len(sessions) == 2
    for session_id, last in ((SessionId("Talk"), 7), (SessionId("talk", folder.name), 8)):
        session = sessions.get(session_id)
        assert session is not None
        assert (session.state.seen, session.unread, session.last, session.turns) == (2, [7], last, 3)
        assert (session.created, session.updated) == (1.5, 2.5)
