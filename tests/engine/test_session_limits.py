"""Sessions of different owners, in bounded memory or a bounded folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import msrnn
from msrnn.engine.local_executor import LocalExecutor
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import DAY, Sessions
from msrnn.errors import SessionError
from tests.helpers.session_turns import GREEDY, ask
from tests.helpers.tiny import build, llama

ANN, BOB = "a" * 16, "b" * 16


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)


@pytest.fixture
def executor(rnn: msrnn.MultiStateRNN) -> LocalExecutor:
    return LocalExecutor(rnn, 1)


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
