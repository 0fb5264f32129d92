"""The files of sessions, with an executor that has no model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from msrnn.core.shared_sizes import FileSizes
from msrnn.engine.session_files import Session, SessionFiles, info_of
from msrnn.engine.session_id import SessionId
from msrnn.errors import SessionUnreadableError
from tests.helpers.fake_executor import FakeExecutor, FakeState

OWNER = "0123456789abcdef"
TALK = SessionId("Talk", OWNER)


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


def files(executor: FakeExecutor, folder: Path, **options: Any) -> SessionFiles:
    return SessionFiles(executor, folder, **{"owns": lambda _: True, **options})


def session(executor: FakeExecutor, tokens: list[int], **more: Any) -> Session:
    state = executor.new_state()
    executor.read(state, tokens)
    made: dict[str, Any] = {"unread": [9], "last": 9, "turns": 2, "created": 1.5, "updated": 2.5, **more}
    return Session(executor.copy(state, "host"), **made)


def test_a_session_is_read_as_it_was_written(executor: FakeExecutor, tmp_path: Path) -> None:
    folder = files(executor, tmp_path)
    written = session(executor, [5, 6, 7])
    info = folder.write(TALK, written)
    assert (info.name, info.tokens, info.turns, info.positions) == ("Talk", 4, 2, "original")
    assert info == info_of(TALK, written, FileSizes(folder.path(TALK).stat().st_size))
    found = folder.read(TALK)
    assert isinstance(found.state, FakeState)
    assert (found.state.tokens, found.state.place) == ([5, 6, 7], "host")
    assert found._replace(state=written.state) == written
    assert [folder.info(TALK), *folder.infos()] == [info, info]


def test_owners_have_folders_and_capitals_have_names_of_their_own(executor: FakeExecutor, tmp_path: Path) -> None:
    folder = files(executor, tmp_path)
    for name in (SessionId("talk"), SessionId("Talk"), TALK):
        folder.write(name, session(executor, [5]))
    paths = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors"))
    assert paths == [f"{OWNER}/=talk.safetensors", "=talk.safetensors", "talk.safetensors"]
    assert {info.id for info in folder.infos()} == {SessionId("talk"), SessionId("Talk"), TALK}
    folder.delete(SessionId("Talk"))
    assert {info.id for info in folder.infos()} == {SessionId("talk"), TALK}
    folder.delete(SessionId("Talk"))  # again


def test_an_old_file_gets_its_new_name(executor: FakeExecutor, tmp_path: Path) -> None:
    """When names were file names."""
    folder = files(executor, tmp_path)
    folder.write(SessionId("Talk"), session(executor, [5]))
    folder.path(SessionId("Talk")).rename(tmp_path / "Talk.safetensors")
    assert [info.name for info in folder.infos()] == ["Talk"]
    assert [path.name for path in tmp_path.iterdir()] == ["=talk.safetensors"]


def test_sessions_of_another_engine_are_left_alone(executor: FakeExecutor, tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        files(executor, tmp_path).write(SessionId(name), session(executor, [5]))
    (tmp_path / "theirs.safetensors").write_text("unfinished")
    mine = files(executor, tmp_path, owns=lambda name: name == "mine")
    assert [info.name for info in mine.infos()] == ["mine"]
    assert (tmp_path / "theirs.safetensors").exists()


@pytest.mark.parametrize(
    "change", [{"columns": []}, {"columns": [-1]}, {"columns": [True]}, {"columns": 3}, {"notes": None}, {"notes": {}}]
)
def test_a_damaged_file_is_set_aside(
    executor: FakeExecutor, tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = files(executor, tmp_path)
    folder.write(SessionId("talk"), session(executor, [5]))
    path = folder.path(SessionId("talk"))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with caplog.at_level(logging.WARNING):
        assert [*folder.infos()] == []
    assert [found.name for found in tmp_path.iterdir()] == ["talk.safetensors.damaged"]
    assert "talk.safetensors" in caplog.text


def test_a_file_that_is_damaged_later(executor: FakeExecutor, tmp_path: Path) -> None:
    folder = files(executor, tmp_path)
    folder.write(SessionId("talk"), session(executor, [5]))
    folder.path(SessionId("talk")).write_text("half")
    with pytest.raises(SessionUnreadableError, match="session 'talk': its file is damaged") as refused:
        folder.read(SessionId("talk"))
    assert str(tmp_path) not in str(refused.value)
    assert folder.find(SessionId("talk")) is None
    assert not folder.path(SessionId("talk")).exists()


def test_a_state_may_be_read_by_another_executor(executor: FakeExecutor, tmp_path: Path) -> None:
    files(executor, tmp_path).write(TALK, session(executor, [5, 6]))
    longer = FakeExecutor(positions="compressed")
    with pytest.raises(SessionUnreadableError, match="of another model or setting"):
        files(longer, tmp_path).read(TALK)
    found = files(longer, tmp_path, load=executor.load).read(TALK)
    assert (found.state.seen, found.state.fingerprint["positions"]) == (2, "original")
