"""Session files: their paths, and their notes. Files are not trusted."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from msrnn.core.atomic import make_private_folder, remove_unfinished
from msrnn.engine.executor import Executor, StateHandle
from msrnn.engine.session_id import SessionId, is_owner
from msrnn.errors import FileError, SessionUnreadableError, UsageError

SUFFIX, DAMAGED = ".safetensors", ".damaged"
_LATEST = 2**40  # seconds since 1970: a time stamp beyond this year 36,812 is damage
_log = logging.getLogger(__name__)


class Session(NamedTuple):
    """A conversation after its last finished turn."""

    state: StateHandle  # of one sequence, on the host; nobody may change it
    unread: list[int]  # tokens that belong to the conversation, but that the state has not read yet
    last: int | None  # the last token of the conversation, read or not; None: not known
    turns: int
    created: float  # seconds since 1970
    updated: float

    @property
    def tokens(self) -> int:
        return self.state.seen + len(self.unread)


class SessionInfo(NamedTuple):
    """What a list of sessions shows."""

    id: SessionId
    tokens: int
    turns: int
    created: float
    updated: float
    nbytes: int
    positions: str  # of the tokens in its state

    @property
    def name(self) -> str:
        return self.id.name


class SessionFiles:
    """A folder with one file per session, and a folder in it for each owner.

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
        self._executor, self._folder, self._owns, self._load = executor, folder, owns, load or executor.load
        make_private_folder(folder)

    def infos(self) -> Iterator[SessionInfo]:
        """All sessions of this engine. A damaged file is put aside, and what a killed process has left is removed."""
        owners = [path for path in self._folder.iterdir() if path.is_dir() and is_owner(path.name)]
        for folder in [self._folder, *owners]:
            owner = "" if folder == self._folder else folder.name
            remove_unfinished(folder, lambda name: name.endswith(SUFFIX) and self._is_ours(name.removesuffix(SUFFIX)))
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                if self._is_ours(path.stem) and (info := self._info(path, owner)) is not None:
                    yield info

    def _is_ours(self, stem: str) -> bool:
        return self._owns(_decode_name(stem))

    def _info(self, path: Path, owner: str) -> SessionInfo | None:
        try:
            found = SessionId(_decode_name(path.stem), owner)
            found.check()
            if path != self.path(found):  # it was written when names were file names
                if self.path(found).exists():
                    raise UsageError(f"{self.path(found)} is the same session; keep one of the two")
                path = path.rename(self.path(found))
            return self.info(found)
        except UsageError as error:
            _set_aside(path, error)
        except OSError as error:  # which may pass: the file is not at fault
            _log.warning("%s cannot be read, and its session is not there: %s", _show(path), _show(error))
        return None

    def find(self, session: SessionId) -> SessionInfo | None:
        """What a session's file says now; None if it is damaged, and put aside."""
        try:
            return self.info(session)
        except UsageError as error:
            _set_aside(self.path(session), error)
            return None

    def path(self, session: SessionId) -> Path:
        return self._folder / session.owner / f"{_encode_name(session.name)}{SUFFIX}"

    def info(self, session: SessionId) -> SessionInfo:
        path = self.path(session)
        description = self._executor.describe(path)
        fields, columns = _fields(description.get("notes"), path), description.get("columns")
        if not isinstance(columns, list) or not columns or not all(type(n) is int and n >= 0 for n in columns):
            raise FileError("not a session that the engine saved", path, advice="move it out of this folder")
        tokens = max(columns) + len(fields["unread"])
        times = fields["turns"], fields["created"], fields["updated"]
        return SessionInfo(session, tokens, *times, path.stat().st_size, str(description.get("positions")))

    def read(self, session: SessionId) -> Session:
        """Errors do not name the file: clients read them. The log has it."""
        path = self.path(session)
        try:
            while True:
                description, state = self._executor.describe(path), self._load(path)
                if self._executor.describe(path) == description:  # or else a new turn has taken its place in between
                    return Session(self._executor.copy(state, "host"), **_fields(description.get("notes"), path))
        except UsageError as error:
            _log.warning("%r cannot be read: %s", session, error)
            message = "its file is damaged, or of another model or setting"
            raise SessionUnreadableError(message, session, advice="delete it, or begin another") from error

    def write(self, session_id: SessionId, session: Session) -> SessionInfo:
        path = self.path(session_id)
        make_private_folder(path.parent)
        notes: dict[str, Any] = {"unread": session.unread, "last": session.last, "turns": session.turns}
        notes |= {"created": session.created, "updated": session.updated}
        self._executor.save(session.state, path, notes)
        return info_of(session_id, session, path.stat().st_size)

    def delete(self, session: SessionId) -> None:
        self.path(session).unlink(missing_ok=True)


def _set_aside(path: Path, error: UsageError) -> None:
    _log.warning("%s is not a session, and is put aside as *%s: %s", _show(path), DAMAGED, _show(error))
    try:
        path.rename(path.with_name(path.name + DAMAGED))
    except OSError as cause:
        _log.warning("%s stays where it is: %s", _show(path), _show(cause))


def _show(value: object) -> str:
    """For the log: a file's name may have bytes that are no text."""
    return str(value).encode(errors="backslashreplace").decode()


def info_of(session_id: SessionId, session: Session, nbytes: int) -> SessionInfo:
    positions = str(session.state.fingerprint["positions"])
    return SessionInfo(session_id, session.tokens, session.turns, session.created, session.updated, nbytes, positions)


def _encode_name(name: str) -> str:
    """A file name for a name: some systems do not tell `Talk` from `talk`."""
    return re.sub("[A-Z]", lambda letter: f"={letter[0].lower()}", name)


def _decode_name(stem: str) -> str:
    return re.sub("=([a-z])", lambda letter: letter[1].upper(), stem)


Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, lt=_LATEST, allow_inf_nan=False)]


class _Notes(BaseModel):
    """The fields of a session that its file has beside the state."""

    model_config = ConfigDict(strict=True, extra="ignore")

    unread: list[Count]
    last: Count | None = None
    turns: Count
    created: Seconds
    updated: Seconds


def _fields(notes: Any, path: Path) -> dict[str, Any]:
    """The fields of a session that its file has beside the state; an old file does not have the last token."""
    try:
        found = _Notes.model_validate(notes)
    except ValidationError as error:
        raise FileError("not a session that the engine saved", path, advice="move it out of this folder") from error
    unread = found.unread
    return {"last": unread[-1] if unread else None, **found.model_dump(exclude_unset=True)}
