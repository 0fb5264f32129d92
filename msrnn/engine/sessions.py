"""Conversations that go on: the state after the last turn, by name; in a folder they survive a restart."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from msrnn.core.atomic import remove_unfinished
from msrnn.core.state import MultiState
from msrnn.core.state_file import load_description
from msrnn.engine.writer import Writer, written
from msrnn.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SUFFIX = ".safetensors"


P = ParamSpec("P")
R = TypeVar("R")


def _locked(method: Callable[P, R]) -> Callable[P, R]:
    @wraps(method)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        sessions: Any = args[0]
        with sessions._lock:
            return method(*args, **kwargs)

    return locked


class Session(NamedTuple):
    """A conversation after its last finished turn."""

    state: MultiState  # of one row, on the host; nobody may change it
    unread: list[int]  # tokens that belong to the conversation, but that the state has not read yet
    turns: int
    created: float  # seconds since 1970
    updated: float

    @property
    def tokens(self) -> int:
        return int(self.state.seen[0]) + len(self.unread)


class SessionInfo(NamedTuple):
    """What a list of sessions shows."""

    name: str
    tokens: int
    turns: int
    created: float
    updated: float


class Sessions:
    """Sessions by name. A turn replaces a session when it is finished; until then the old one stays.

    load    reads a state from a file
    folder  where every finished turn is written, whole or not at all; None: sessions are in memory only
    memory  bytes of states that are held; further ones are in their files alone, or are refused without a folder
    writer  the thread that writes files
    owns    whether a session is this engine's, where several share the folder; others are only read, to fork them
    """

    def __init__(
        self,
        load: Callable[[Path], MultiState],
        folder: Path | None = None,
        memory: int = 2**30,
        writer: Writer | None = None,
        owns: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._load, self._folder, self._memory, self._writer = load, folder, memory, writer or Writer()
        self._owns = owns
        self._lock = threading.RLock()  # the threads of an engine, its writer and a server; never held over disk work
        self._held: OrderedDict[str, Session] = OrderedDict()
        self._writing: dict[str, int] = {}  # bytes of turns that are finished but not in their files yet
        self._infos: dict[str, SessionInfo] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(folder, lambda name: name.endswith(SUFFIX) and owns(name.removesuffix(SUFFIX)))
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                if owns(path.stem):
                    self._infos[path.stem] = _info(path)

    def __contains__(self, name: str) -> bool:
        if self._owns(name):
            return name in self._infos
        return NAME.fullmatch(name) is not None and self._folder is not None and self._path(name).exists()

    def info(self, name: str) -> SessionInfo | None:
        """The entry of a conversation in `infos`; None if there is none of this name."""
        check_name(name)
        return self._infos.get(name)

    def turns(self, name: str) -> int:
        """Finished turns; 0 if there is no such session yet."""
        info = self.info(name)
        return info.turns if info else 0

    @property
    def behind(self) -> bool:
        """Whether the disk is far behind with finished turns, so that no further ones should begin."""
        return sum([*self._writing.values()]) > self._memory

    @_locked
    def infos(self) -> list[SessionInfo]:
        """All sessions; the one that was used last comes first."""
        return sorted(self._infos.values(), key=lambda info: -info.updated)

    def get(self, name: str) -> Session | None:
        """The session of this name; None if there is none yet. One that is not in memory is read from its file."""
        check_name(name)
        if not self._owns(name):
            return self._read(name) if name in self else None
        with self._lock:
            info, session = self._infos.get(name), self._held.get(name)
            if info is None:
                return None
            if session is not None:
                self._hold(name, session)
                return session
        session = self._read(name)
        with self._lock:
            if self._infos.get(name) is info and session.turns == info.turns:  # and not a turn further, or deleted
                self._hold(name, session)
        return session

    def put(self, name: str, state: MultiState, unread: list[int]) -> Future[None]:
        """A finished turn: written to the folder first, then shown. The result tells when that is done, or its error.

        Until then nothing but `get`, which still has the turn before, may use the session.
        """
        check_name(name)
        before, now = self._infos.get(name), time.time()
        turns, created = (before.turns + 1, before.created) if before else (1, now)
        return self._store(name, Session(state.cpu(), unread, turns, created, now))

    def fork(self, name: str, other: str) -> None:
        """A second session that goes on from the same turn."""
        check_name(other)
        session = self.get(name)
        if session is None:
            raise UsageError(f"session {name!r}: there is none of this name")
        self._store(other, session, new=True).result()

    @_locked
    def delete(self, name: str) -> None:
        check_name(name)
        self._check_owned(name)
        if name not in self._infos:
            raise UsageError(f"session {name!r}: there is none of this name")
        self._check_written(name)
        if self._folder is not None:
            self._path(name).unlink(missing_ok=True)
        self._held.pop(name, None)
        del self._infos[name]

    @_locked
    def _store(self, name: str, session: Session, new: bool = False) -> Future[None]:
        self._check_owned(name)
        if new and name in self._infos:
            raise UsageError(f"session {name!r}: exists already; delete it, or choose another name")
        self._check_written(name)
        self._check_room(name, session)
        if self._folder is None:
            self._show(name, session)
            return written()
        self._writing[name] = session.state.nbytes
        return self._writer.submit(lambda: self._write(name, session))

    def _write(self, name: str, session: Session) -> None:
        try:
            self._check_alone(name)
            notes = {"unread": session.unread, "turns": session.turns}
            session.state.save(self._path(name), {**notes, "created": session.created, "updated": session.updated})
            self._show(name, session)
        finally:
            del self._writing[name]

    def _check_alone(self, name: str) -> None:
        """Refuse to replace a turn that this process has not seen: a second one has gone on with the session."""
        path = self._path(name)
        if not path.exists():
            return
        info, known = _info(path), self._infos.get(name)
        if known is not None and info.turns == known.turns:
            return
        with self._lock:
            self._infos[name] = info
            self._held.pop(name, None)
        raise UsageError(f"session {name!r}: another process has gone on with it; ask again")

    @_locked
    def _show(self, name: str, session: Session) -> None:
        self._infos[name] = SessionInfo(name, session.tokens, session.turns, session.created, session.updated)
        self._hold(name, session)

    def _check_owned(self, name: str) -> None:
        if not self._owns(name):
            raise UsageError(f"session {name!r}: belongs to another engine of this folder; ask that one")

    def _check_written(self, name: str) -> None:
        if name in self._writing:
            raise UsageError(f"session {name!r}: its last turn is being written; wait for its end")

    def _check_room(self, name: str, session: Session) -> None:
        """Without a folder, a session that does not fit is refused: another one would be lost."""
        held = sum(other.state.nbytes for key, other in self._held.items() if key != name)
        if self._folder is None and held + session.state.nbytes > self._memory:
            raise UsageError(
                f"session {name!r}: {len(self._held)} sessions fill the {self._memory:,} bytes for them; delete one, "
                "or keep sessions in a folder"
            )

    def _hold(self, name: str, session: Session) -> None:
        """Keep a session in memory, and let go of idle ones that their files have as well."""
        self._held[name] = session
        self._held.move_to_end(name)
        while self._folder is not None and sum(held.state.nbytes for held in self._held.values()) > self._memory:
            self._held.popitem(last=False)

    def _read(self, name: str) -> Session:
        path = self._path(name)
        while True:
            description, state = load_description(path), self._load(path)
            if load_description(path) == description:  # or else a new turn has taken its place in between
                return Session(state.cpu(), *_fields(description["notes"], path))

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}{SUFFIX}"


def check_name(name: str) -> None:
    """Names are file names, so they are plain."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(f"session {name!r:.80}: must be 1 to 64 letters, digits, hyphens and underscores")


def _info(path: Path) -> SessionInfo:
    description = load_description(path)
    unread, turns, created, updated = _fields(description["notes"], path)
    return SessionInfo(path.stem, max(description["columns"]) + len(unread), turns, created, updated)


def _fields(notes: Any, path: Path) -> tuple[list[int], int, float, float]:
    """The fields of a session that its file has beside the state; files are not trusted."""
    try:
        unread, turns, created, updated = (notes[name] for name in ("unread", "turns", "created", "updated"))
        sound = isinstance(unread, list) and all(type(token) is int and token >= 0 for token in unread)
        if not (sound and type(turns) is int and turns >= 0):
            raise TypeError
        return unread, turns, float(created), float(updated)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a session that the engine saved; move it out of this folder") from error
