"""Session files: their paths, and their notes. Files are not trusted."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msrnn.core.shared_sizes import FileSizes
from msrnn.core.state_folder import StateFolder, printable
from msrnn.engine.executor import Executor, StateHandle
from msrnn.engine.session_id import SessionId, is_owner
from msrnn.errors import FileError, SessionUnreadableError, UsageError

_log = logging.getLogger(__name__)


class Session(NamedTuple):
    """A conversation after its last finished turn."""

    state: StateHandle  # of one sequence, on the host; it must not change
    unread: list[int]  # tokens that belong to the conversation, but that the state has not read yet
    last: int | None  # the last token of the conversation, read or not; None: not known
    turns: int
    created: float  # seconds since 1970
    updated: float
    beginning: str = ""  # a name for what it begins with, as its first request gave it
    size: int | None = None  # of its state, as its first request gave it; None: that of the engine

    @property
    def tokens(self) -> int:
        return self.state.seen + len(self.unread)

    @property
    def nbytes(self) -> int:
        """Bytes of the state and its archive."""
        return self.state.nbytes + self.state.archive_nbytes


class SessionInfo(NamedTuple):
    """An entry in a list of sessions."""

    id: SessionId
    tokens: int
    turns: int
    created: float
    updated: float
    sizes: FileSizes
    positions: str  # of the tokens in its state
    beginning: str = ""
    size: int | None = None

    @property
    def name(self) -> str:
        return self.id.name

    @property
    def nbytes(self) -> int:
        """All its bytes; a fork has some of them in common with its origin."""
        return self.sizes.nbytes


class SessionFiles:
    """A folder with one file per session, and one with its archive's segments; and a folder in it for each owner.

    load  reads a state from a file; by default, the executor does
    owns  whether a session is this engine's, by its name, where several engines share the folder
    """

    def __init__(
        self,
        executor: Executor,
        folder: Path,
        owns: Callable[[str], bool],
        load: Callable[[Path], StateHandle] | None = None,
    ) -> None:
        self._executor, self._path, self._owns = executor, folder, owns
        self._files = _Files(executor, load or executor.load)
        self._folder("").create()

    def _folder(self, owner: str) -> StateFolder[StateHandle]:
        return StateFolder(self._path / owner, self._files, lambda name: self._owns(_decode_name(name)))

    def infos(self) -> Iterator[SessionInfo]:
        """All sessions of this engine. A damaged file is set aside, and unfinished ones are removed."""
        owners = [path.name for path in self._path.iterdir() if path.is_dir() and is_owner(path.name)]
        for owner in ["", *owners]:
            folder = self._folder(owner)
            folder.remove_unfinished()
            for name in folder.list_names():
                if (info := self._find_info(folder, name, owner)) is not None:
                    yield info

    def _find_info(self, folder: StateFolder[StateHandle], name: str, owner: str) -> SessionInfo | None:
        try:
            found = SessionId(_decode_name(name), owner)
            found.check()
            path = self.path(found)
            if folder.path_of(name) != path:  # it was written when names were file names
                if path.exists():
                    raise UsageError(f"{path} is the same session; keep one of the two")
                folder.rename(name, path.stem)
                name = path.stem
            return self.info(found)
        except UsageError as error:
            folder.set_aside(name, error)
        except OSError as error:  # which may pass: the file is not at fault
            shown = printable(folder.path_of(name))
            _log.warning("%s cannot be read, and its session is not there: %s", shown, printable(error))
        return None

    def find(self, session: SessionId) -> SessionInfo | None:
        """The entry of a session's file now; None if it is damaged, and set aside."""
        try:
            return self.info(session)
        except UsageError as error:
            self._folder(session.owner).set_aside(_encode_name(session.name), error)
            return None

    def path(self, session: SessionId) -> Path:
        return self._folder(session.owner).path_of(_encode_name(session.name))

    def info(self, session: SessionId) -> SessionInfo:
        path = self.path(session)
        description, sizes = self._folder(session.owner).describe(_encode_name(session.name))
        fields, columns = _fields(description.get("notes"), path), description.get("columns")
        if not isinstance(columns, list) or not columns or not all(type(n) is int and n >= 0 for n in columns):
            raise FileError("not a session that the engine saved", path, advice="move it out of this folder")
        tokens = max(columns) + len(fields["unread"])
        times = fields["turns"], fields["created"], fields["updated"]
        more = str(description.get("positions")), fields.get("beginning", ""), fields.get("size")
        return SessionInfo(session, tokens, *times, sizes, *more)

    def read(self, session: SessionId) -> Session:
        """Errors do not name the file: clients read them. The log has it."""
        try:
            state, description = self._folder(session.owner).load(_encode_name(session.name))
            fields = _fields(description.get("notes"), self.path(session))
            return Session(self._executor.copy(state, "host"), **fields)
        except UsageError as error:
            _log.warning("%r cannot be read: %s", session, error)
            message = "its file is damaged, or of another model or setting"
            raise SessionUnreadableError(message, session, advice="delete it, or begin another") from error

    def write(self, session_id: SessionId, session: Session) -> SessionInfo:
        notes: dict[str, Any] = {"unread": session.unread, "last": session.last, "turns": session.turns}
        notes |= {"created": session.created, "updated": session.updated, "beginning": session.beginning}
        if session.size is not None:
            notes["size"] = session.size
        sizes = self._folder(session_id.owner).save(_encode_name(session_id.name), session.state, notes)
        return info_of(session_id, session, sizes)

    def delete(self, session: SessionId) -> None:
        self._folder(session.owner).delete(_encode_name(session.name))


class _Files:
    """An executor's state files, which `load` may read with another executor."""

    def __init__(self, executor: Executor, load: Callable[[Path], StateHandle]) -> None:
        self._executor, self._load = executor, load

    def save(self, state: StateHandle, path: Path, notes: Mapping[str, Any]) -> None:
        self._executor.save(state, path, notes)

    def load(self, path: Path) -> StateHandle:
        return self._load(path)

    def describe(self, path: Path) -> dict[str, Any]:
        return self._executor.describe(path)


def info_of(session_id: SessionId, session: Session, sizes: FileSizes) -> SessionInfo:
    positions = str(session.state.fingerprint["positions"])
    times = session.turns, session.created, session.updated
    return SessionInfo(session_id, session.tokens, *times, sizes, positions, session.beginning, session.size)


def _encode_name(name: str) -> str:
    """The file name of a session: some file systems do not distinguish `Talk` and `talk`."""
    return re.sub("[A-Z]", lambda letter: f"={letter[0].lower()}", name)


def _decode_name(stem: str) -> str:
    return re.sub("=([a-z])", lambda letter: letter[1].upper(), stem)


def _fields(notes: Any, path: Path) -> dict[str, Any]:
    """The checked notes of a session's file."""
    from msrnn.engine.session_notes import check_notes  # an engine without session files does not need pydantic

    return check_notes(notes, path)
