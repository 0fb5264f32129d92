"""Sessions: only what is new is sent, and the conversation is as if it had been read at once; also after a restart."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.engine.requests import Request
from msrnn.errors import UsageError
from tests.helpers.characters import character_tokenizer
from tests.helpers.tiny import build, llama

pytestmark = pytest.mark.usefixtures("overlaps")

GREEDY = msrnn.SamplingParams(temperature=0, max_tokens=6)
TURNS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21], [30, 31, 32, 33], [40]]


@pytest.fixture
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)


def ask(engine: msrnn.Engine, prompt: list[int], session: str | None, **changes: Any) -> Request:
    request = engine.request(prompt, msrnn.SamplingParams(**{**vars(GREEDY), **changes}), session)
    engine.add(request)
    while not engine.idle:
        engine.step()
    return request


def conversation(rnn: msrnn.MultiStateRNN, turns: list[list[int]]) -> list[list[int]]:
    """Answers to a history that is sent and read anew at every turn; stop tokens belong to it."""
    engine, history, found = msrnn.Engine(rnn, slots=1, prefix_bytes=0, prefix_host_bytes=0), list[int](), []
    for turn in turns:
        history += turn
        answer = ask(engine, history, None).answers[0]
        found.append(answer.tokens)
        history += answer.tokens + ([2] if answer.finish_reason == "stop" else [])
    return found


def test_turns_are_the_conversation_read_at_once(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    found = [ask(engine, turn, "talk").answers[0].tokens for turn in TURNS]
    assert found == conversation(rnn, TURNS)
    (info,) = engine.sessions.infos()
    assert (info.name, info.turns) == ("talk", len(TURNS))
    assert info.tokens >= sum(map(len, TURNS)) + sum(map(len, found))


def test_a_restart(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    """Every turn by another engine, which knows the folder only."""
    found = [ask(msrnn.Engine(rnn, slots=2, sessions=tmp_path), turn, "talk").answers[0].tokens for turn in TURNS]
    assert found == conversation(rnn, TURNS)


@pytest.mark.parametrize("saved", [False, True])
def test_a_session_keeps_what_it_began_with(rnn: msrnn.MultiStateRNN, tmp_path: Path, saved: bool) -> None:
    folder = tmp_path if saved else None
    engine = msrnn.Engine(rnn, slots=2, sessions=folder)
    for beginning in ("first", "second"):
        request = engine.request([5, 6], GREEDY, "talk", beginning=beginning)
        engine.add(request)
        while not engine.idle:
            engine.step()
    engine.sessions.fork("talk", "other")
    if saved:
        engine.close()
        engine = msrnn.Engine(rnn, slots=2, sessions=folder)
    for name in ("talk", "other"):
        session = engine.sessions.get(name)
        assert session is not None
        assert session.beginning == "first"
        ask(engine, [7], name)
    assert [info.beginning for info in engine.sessions.infos()] == ["first", "first"]


def test_idle_sessions_are_in_their_files_alone(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    engine = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    engine.sessions._memory = rnn.state().nbytes
    found: dict[str, list[list[int]]] = {"a": [], "b": [], "c": []}
    for turn in TURNS:
        for name in found:
            found[name].append(ask(engine, turn, name).answers[0].tokens)
            assert len(engine.sessions._held) == 1
    assert all(answers == conversation(rnn, TURNS) for answers in found.values())


def test_several_sessions_at_once(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=3)
    for start in (0, 1):
        requests = [engine.request(turn, GREEDY, f"s{i}") for i, turn in enumerate(TURNS)]
        for request in requests:
            engine.add(request)
        while not engine.idle:
            engine.step()
        if start:
            expected = [conversation(rnn, [turn, turn])[1] for turn in TURNS]
            assert [request.answers[0].tokens for request in requests] == expected


def test_a_turn_that_is_cancelled_changes_nothing(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    ask(engine, TURNS[0], "talk")
    request = engine.request([50, 51, 52], GREEDY, "talk")
    engine.add(request)
    engine.step()
    request.cancel()
    while not engine.idle:
        engine.step()
    assert request.answers[0].finish_reason == "cancelled"
    assert ask(engine, TURNS[1], "talk").answers[0].tokens == conversation(rnn, TURNS[:2])[1]


def test_a_session_answers_one_request_at_a_time(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    one, other = engine.request([5, 6], GREEDY, "talk"), engine.request([7], GREEDY, "talk")
    engine.add(one)
    engine.add(other)
    while not engine.idle:
        engine.step()
    assert other.answers[0].finish_reason == "error"
    assert "is answering another request" in str(other.answers[0].error)
    assert one.answers[0].tokens == conversation(rnn, [[5, 6]])[0]


@pytest.mark.parametrize("begun", [False, True])
def test_a_prompt_for_a_session_that_has_gone_on_is_refused(rnn: msrnn.MultiStateRNN, begun: bool) -> None:
    """It was made for another turn: its special tokens, or its place in a chat template, would be wrong."""
    engine = msrnn.Engine(rnn, slots=1)
    if begun:
        ask(engine, TURNS[0], "talk")
    one, other = engine.request([5, 6], GREEDY, "talk"), engine.request([7], GREEDY, "talk")
    for request in (one, other):
        engine.add(request)
        while not engine.idle:
            engine.step()
    assert one.answers[0].finish_reason in ("stop", "length")
    assert other.answers[0].finish_reason == "error"
    assert "has changed since" in str(other.answers[0].error)


def test_a_fork_goes_its_own_way(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    engine = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    ask(engine, TURNS[0], "talk")
    engine.sessions.fork("talk", "other")
    other = [[60, 61], [62]]
    for turn in other:
        last = ask(engine, turn, "other").answers[0].tokens
    assert last == conversation(rnn, [TURNS[0], *other])[-1]
    assert ask(engine, TURNS[1], "talk").answers[0].tokens == conversation(rnn, TURNS[:2])[1]
    with pytest.raises(UsageError, match="'other': exists already"):
        engine.sessions.fork("talk", "other")
    engine.sessions.delete("other")
    assert [info.name for info in engine.sessions.infos()] == ["talk"]
    assert [path.name for path in tmp_path.iterdir()] == ["talk.safetensors"]
    with pytest.raises(UsageError, match="there is none"):
        engine.sessions.delete("other")
    assert ask(engine, TURNS[0], "other").answers[0].tokens == conversation(rnn, TURNS[:1])[0]


def test_a_session_that_cannot_be_saved_is_an_error(
    rnn: msrnn.MultiStateRNN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    ask(engine, TURNS[0], "talk")

    def full(*_: object, **how: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(msrnn.MultiState, "save", full)
        answer = ask(engine, TURNS[1], "talk").answers[0]
    assert answer.finish_reason == "error"
    assert "the session is not saved, and stays as it was" in str(answer.error)
    assert ask(engine, TURNS[1], "talk").answers[0].tokens == conversation(rnn, TURNS[:2])[1]


def test_a_damaged_file_fails_its_own_request_only(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    engine = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    ask(engine, TURNS[0], "talk")
    engine = msrnn.Engine(rnn, slots=2, sessions=tmp_path)
    path = tmp_path / "talk.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    damaged, sound = engine.request([7], GREEDY, "talk"), engine.request(TURNS[0], GREEDY)
    for request in (damaged, sound):
        engine.add(request)
    while not engine.idle:
        engine.step()
    assert damaged.answers[0].finish_reason == "error"
    assert "session 'talk': its file is damaged" in str(damaged.answers[0].error)
    assert str(tmp_path) not in str(damaged.answers[0].error)
    assert sound.answers[0].tokens == conversation(rnn, TURNS[:1])[0]


def test_names_are_plain(rnn: msrnn.MultiStateRNN) -> None:
    with pytest.raises(UsageError, match="must be 1 to 64 letters"):
        msrnn.Engine(rnn, slots=1).request([5], GREEDY, "../up")


def test_a_session_has_one_answer(rnn: msrnn.MultiStateRNN) -> None:
    with pytest.raises(UsageError, match="n=2: a session continues with one answer"):
        msrnn.Engine(rnn, slots=2).request([5], msrnn.SamplingParams(n=2), "talk")


def test_special_tokens_are_at_the_beginning_only() -> None:
    tokenizer = character_tokenizer()
    rnn = msrnn.MultiStateRNN(build(llama(vocab_size=len(tokenizer)), "cpu"), "tova", 9)
    engine = msrnn.Engine(rnn, slots=1, tokenizer=tokenizer)
    whole, part = (tokenizer("ab", add_special_tokens=special)["input_ids"] for special in (True, False))
    assert len(whole) > len(part)
    for expected in (whole, part, part):
        request = engine.request("ab", GREEDY, "talk")
        assert request.prompt == expected
        engine.add(request)
        while not engine.idle:
            engine.step()
    assert engine.request("ab", GREEDY).prompt == whole


KILLED = """
import os, sys
sys.path.insert(0, {root!r})
import msrnn
from tests.helpers.tiny import build, llama
import msrnn.core.state_file as state_file

rnn = msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)
engine = msrnn.Engine(rnn, slots=2, sessions={folder!r})
params = msrnn.SamplingParams(temperature=0, max_tokens=6)
write, written = state_file.save_file, []


def killed(tensors, path, metadata):
    if written:
        with open(path, "wb") as file:
            file.write(b"half")
        os.kill(os.getpid(), 9)
    write(tensors, path, metadata=metadata)
    written.append(path)


state_file.save_file = killed
for turn in {turns!r}:
    engine.add(engine.request(turn, params, "talk"))
    while not engine.idle:
        engine.step()
"""


@pytest.mark.parametrize("overlaps", [False], indirect=True)  # it has an engine of its own
def test_a_process_that_is_killed_while_it_writes(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    """The session goes on from its last finished turn."""
    folder = tmp_path / "sessions"
    code = KILLED.format(root=str(Path(__file__).parents[2]), folder=str(folder), turns=TURNS[:2])
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    engine = msrnn.Engine(rnn, slots=2, sessions=folder)
    assert [info.turns for info in engine.sessions.infos()] == [1]
    assert ask(engine, TURNS[1], "talk").answers[0].tokens == conversation(rnn, TURNS[:2])[1]
