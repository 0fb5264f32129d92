"""The folder of sessions: names of files, files of earlier versions, and damaged files."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import msrnn
from msrnn.engine.local_executor import LocalExecutor
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import Sessions
from msrnn.server.affinity import assign_replica
from tests.helpers.session_turns import ask
from tests.helpers.tiny import build, llama


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)


@pytest.fixture
def executor(rnn: msrnn.MultiStateRNN) -> LocalExecutor:
    return LocalExecutor(rnn, 1)


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
