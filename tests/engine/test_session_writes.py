"""Sessions are written by another thread: answers go on meanwhile, and one that is not saved has no end yet."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.engine.executor import StateHandle
from msrnn.engine.requests import Event, Request
from msrnn.engine.scheduler import Counts
from msrnn.engine.sessions import Sessions
from msrnn.errors import UsageError
from tests.helpers.tiny import build, llama

pytestmark = pytest.mark.usefixtures("overlaps")

SHORT = msrnn.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LONG = msrnn.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Disk:
    """A disk that writes when it is allowed to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed, self.asked = threading.Event(), threading.Event()
        self.error: Exception | None = None
        save = msrnn.MultiState.save

        def slow(*args: Any, **how: Any) -> None:
            self.asked.set()
            assert self.allowed.wait(60)
            if self.error is not None:
                raise self.error
            save(*args, **how)

        monkeypatch.setattr(msrnn.MultiState, "save", slow)


@pytest.fixture
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)


@pytest.fixture
def engine(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> msrnn.Engine:
    return msrnn.Engine(rnn, slots=2, sessions=tmp_path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def begin(engine: msrnn.Engine, prompt: list[int], params: msrnn.SamplingParams, session: str | None) -> Request:
    request = engine.request(prompt, params, session)
    engine.add(request)
    return request


def run(engine: msrnn.Engine) -> list[Event]:
    events = []
    while not engine.idle:
        events += engine.step()
    return events


def test_other_answers_go_on_while_a_session_is_written(engine: msrnn.Engine, disk: Disk) -> None:
    short, long = begin(engine, [5, 6], SHORT, "talk"), begin(engine, [7], LONG, None)
    events = [event for _ in range(20) for event in engine.step()]
    assert disk.asked.wait(60)
    assert len(long.answers[0].tokens) >= 19
    assert not short.finished
    assert engine.counts.running == 1
    assert [event.finish_reason for event in events if event.request is short] == [None]
    assert (engine.uses_session("talk"), "talk" in engine.sessions) == (True, False)
    other = begin(engine, [8], SHORT, "talk")
    engine.step()
    assert "is answering another request" in str(other.answers[0].error)
    disk.allowed.set()
    events = [event for event in run(engine) if event.request is short]
    assert [(event.token, event.finish_reason) for event in events] == [(short.answers[0].tokens[1], "length")]
    assert (engine.uses_session("talk"), engine.sessions.turns("talk")) == (False, 1)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("with a prompt in it")])
def test_a_failed_write_is_an_error_of_its_request_alone(
    engine: msrnn.Engine, disk: Disk, error: Exception, tmp_path: Path
) -> None:
    disk.error = error
    disk.allowed.set()
    short, long = begin(engine, [5, 6], SHORT, "talk"), begin(engine, [7], LONG, None)
    run(engine)
    assert short.answers[0].finish_reason == "error"
    assert "stays as it was" in str(short.answers[0].error)
    assert "prompt" not in str(short.answers[0].error)
    assert (long.answers[0].finish_reason, len(long.answers[0].tokens)) == ("length", 40)
    disk.error = None
    assert [event.finish_reason for event in (begin(engine, [5, 6], SHORT, "talk"), run(engine))[1]] == [None, "length"]
    assert (tmp_path / "talk.safetensors").exists()


def test_a_step_that_fails_does_not_end_a_write(
    engine: msrnn.Engine, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = begin(engine, [5, 6], SHORT, "talk"), begin(engine, [7], LONG, None)
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "step", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert (long.answers[0].finish_reason, short.finished) == ("error", False)
    assert engine.uses_session("talk")
    disk.allowed.set()
    run(engine)
    assert (short.answers[0].finish_reason, engine.sessions.turns("talk")) == ("length", 1)


def test_closing_waits_for_writes(engine: msrnn.Engine, disk: Disk, tmp_path: Path) -> None:
    async def leave() -> None:
        stream = engine.stream([5, 6], SHORT, "talk")
        await anext(stream)
        while not disk.asked.is_set():
            await asyncio.sleep(0.001)
        threading.Timer(0.2, disk.allowed.set).start()

    asyncio.run(leave())
    engine.close()
    assert (engine.idle, engine.sessions.turns("talk")) == (True, 1)
    assert not engine.uses_session("talk")
    assert [path.name for path in tmp_path.iterdir()] == ["talk.safetensors"]


def test_no_further_session_begins_when_the_disk_is_far_behind(
    rnn: msrnn.MultiStateRNN, engine: msrnn.Engine, disk: Disk
) -> None:
    """Or states that wait to be written would fill the memory."""
    engine.sessions._memory = rnn.state().nbytes
    many = [begin(engine, [5, 6, i], SHORT, f"s{i}") for i in range(3, 9)]
    for _ in range(20):
        engine.step()
    assert (len(engine.sessions._writing), engine.counts) == (2, Counts(waiting=4, prefill=0, running=0))
    disk.allowed.set()
    run(engine)
    assert {request.answers[0].finish_reason for request in many} == {"length"}
    assert len(engine.sessions.infos()) == 6


def test_a_session_that_is_being_written_is_as_before(engine: msrnn.Engine, disk: Disk) -> None:
    disk.allowed.set()
    begin(engine, [5, 6], SHORT, "talk")
    run(engine)
    disk.allowed.clear()
    begin(engine, [7], SHORT, "talk")
    for _ in range(5):
        engine.step()
    before = engine.sessions.get("talk")
    assert before is not None
    assert (before.turns, before.tokens) == (1, 4)
    with pytest.raises(UsageError, match="'talk': its last turn is being written"):
        engine.sessions.delete("talk")
    disk.allowed.set()
    run(engine)
    after = engine.sessions.get("talk")
    assert after is not None
    assert (after.turns, after.tokens) == (2, 7)


def test_what_a_killed_process_has_left_is_removed(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    left, other = tmp_path / ".talk.safetensors.x1y2.tmp", tmp_path / "notes.txt"
    left.mkdir()
    for path in (left / "file", left / ".tmpa1b2", other):
        path.write_bytes(b"half")
    msrnn.Engine(rnn, slots=1, sessions=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_session_that_is_replaced_while_it_is_read(engine: msrnn.Engine, tmp_path: Path) -> None:
    path, turns = tmp_path / "talk.safetensors", []
    for prompt in ([5, 6], [7]):
        begin(engine, prompt, SHORT, "talk")
        run(engine)
        turns.append(path.read_bytes())
    path.write_bytes(turns[0])

    def load(where: Path) -> StateHandle:
        state = engine.executor.load(where)
        path.write_bytes(turns[1])
        return state

    session = Sessions(engine.executor, tmp_path, load=load).get("talk")
    assert session is not None
    assert (session.turns, session.tokens) == (2, 7)
