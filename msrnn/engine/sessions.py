"""Sessions: the state of a conversation after its last turn, by name. In a folder they survive a restart."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from msrnn.core.shared_sizes import FileSizes, SharedSizes
from msrnn.engine.executor import Executor, StateHandle
from msrnn.engine.session_files import Session, SessionFiles, SessionInfo, info_of
from msrnn.engine.session_id import SessionId
from msrnn.engine.writer import Writer, make_done_future
from msrnn.errors import SessionError, SessionInUseError, SessionStorageFullError, SessionUnwritableError, UsageError

IN_MEMORY, ON_DISK = 2**30, 2**36  # bytes of all sessions by default
DAY = 86_400.0  # seconds
EXPIRY_SECONDS = 60.0  # between two looks for expired sessions
_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def _with_lock(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    @wraps(method)
    def call_with_lock(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return call_with_lock


class Sessions:
    """Sessions by id. A turn replaces a session when it is finished; until then the old one stays.

    executor  copies states to the host, saves and loads them
    folder    where every finished turn is written, whole or not at all; None: sessions are in memory only
    most      bytes of all sessions; files that several have count once. For more, the least recently used one is
              deleted, of the owner that has most
    days      sessions without a turn for this many days are deleted; None: never
    memory    bytes of states that are also held in memory, where sessions are in a folder
    writer    the thread that writes files
    owns      whether a session is this engine's, by its name, where several share the folder; others are only read, to
              fork them
    load      reads a state from a file; by default, the executor does
    """

    def __init__(
        self,
        executor: Executor,
        folder: Path | None = None,
        most: int | None = None,
        days: float | None = None,
        memory: int = IN_MEMORY,
        writer: Writer | None = None,
        owns: Callable[[str], bool] = lambda _: True,
        load: Callable[[Path], StateHandle] | None = None,
    ) -> None:
        self._executor = executor
        self._files = None if folder is None else SessionFiles(executor, folder, owns, load)
        self._most = most or (IN_MEMORY if folder is None else ON_DISK)
        self._days, self._memory, self.writer, self._owns = days, memory, writer or Writer(), owns
        # The threads of an engine, its writer and a server; never held while a state is read or written.
        self._lock = threading.RLock()
        self._held: OrderedDict[SessionId, Session] = OrderedDict()
        self._writing: dict[SessionId, int] = {}  # bytes of turns that are finished but not in their files yet
        self._in_use: dict[SessionId, int] = {}  # bytes of sessions with a turn under way
        self.evicted = Counter(bytes=0, days=0)  # sessions that were deleted, by the limit
        self._stuck: set[SessionId] = set()  # those whose files cannot be deleted
        self._infos: dict[SessionId, SessionInfo] = {}  # the least recently used one first
        self._sizes = defaultdict[str, SharedSizes[SessionId]](SharedSizes)  # of each owner, which share no files
        self._expired = 0.0  # when sessions were last looked through for it
        for info in sorted([] if self._files is None else self._files.infos(), key=lambda info: info.updated):
            self._set(info)
        self._expire()
        self._make_room()

    def __contains__(self, session: str | SessionId) -> bool:
        session = SessionId.of(session)
        if self._owns(session.name):
            return session in self._infos
        return self._files is not None and self._files.path(session).exists()

    def owns(self, name: str) -> bool:
        """Whether a session of this name is this engine's."""
        return self._owns(name)

    def info(self, session: str | SessionId) -> SessionInfo | None:
        """The entry of a session in `infos`; None if there is none of this name."""
        return self._infos.get(SessionId.of(session))

    def turns(self, session: str | SessionId) -> int:
        """Finished turns; 0 if there is no such session yet."""
        info = self.info(session)
        return info.turns if info else 0

    @property
    def behind(self) -> bool:
        """Whether the disk is far behind with finished turns, so that no further ones should begin."""
        return sum([*self._writing.values()]) > self._memory

    @property
    def nbytes(self) -> int:
        return sum(sizes.nbytes for sizes in [*self._sizes.values()])

    def __len__(self) -> int:
        return len(self._infos)

    @_with_lock
    def infos(self, owner: str = "") -> list[SessionInfo]:
        """All sessions of an owner; the one that was used last comes first."""
        self._expire()
        found = [info for info in self._infos.values() if info.id.owner == owner]
        return sorted(found, key=lambda info: (-info.updated, info.name))

    def get(self, session: str | SessionId) -> Session | None:
        """The session of this name; None if there is none yet. One that is not in memory is read from its file."""
        session = SessionId.of(session)
        if not self._owns(session.name):
            return self._read(session) if session in self else None
        with self._lock:
            info, held = self._infos.get(session), self._held.get(session)
            if info is None:
                return None
            if held is not None:
                self._hold(session, held)
                return held
        try:
            found = self._read(session)
        except SessionError:
            if session not in self._infos:  # it was deleted meanwhile
                return None
            raise
        with self._lock:
            if self._infos.get(session) is info and found.turns == info.turns:  # and not a turn further, or deleted
                self._hold(session, found)
        return found

    def _read(self, session: SessionId) -> Session:
        assert self._files is not None
        return self._files.read(session)

    @_with_lock
    def begin(self, session: SessionId, nbytes: int) -> None:
        """Make room for a turn, which takes this many bytes when it is finished. `end` must follow.

        Raises a SessionError if all other sessions are in use, and this one does not fit in addition.
        """
        self._expire()
        self._make_room(session, nbytes)
        self._in_use[session] = nbytes

    @_with_lock
    def end(self, session: SessionId) -> None:
        self._in_use.pop(session, None)

    def put(
        self,
        session: str | SessionId,
        state: StateHandle,
        unread: list[int],
        last: int | None = None,
        follows: tuple[int, float | None] | None = None,
        beginning: str = "",
        size: int | None = None,
    ) -> Future[None]:
        """Add a finished turn: first it is written to the folder, then it is visible, and the future is done.

        `follows`: the turns that the session must have had before, and when it was created; by default those that it
        has. `beginning` and `size` are kept if this is the first turn. Until the turn is written only `get` may use the
        session, and returns the turn before.
        """
        session, state = SessionId.of(session), self._executor.copy(state, "host")
        with self._lock:
            before, now = self._infos.get(session), time.time()
            had = (before.turns, before.created) if before else (0, None)
            if follows not in (None, had):
                raise SessionError("another turn has taken the place of this one", session, advice="ask again")
            begun = (before.beginning, before.size) if before else (beginning, size)
            return self._store(session, Session(state, unread, last, had[0] + 1, had[1] or now, now, *begun))

    def fork(self, session: str | SessionId, other: str | SessionId) -> None:
        """Create a second session that continues from the same turn."""
        session, other = SessionId.of(session), SessionId.of(other)
        found = self.get(session)
        if found is None:
            raise SessionError("there is none of this name", session)
        now = time.time()
        self._store(other, found._replace(created=now, updated=now), new=True, source=session).result()

    @_with_lock
    def delete(self, session: str | SessionId) -> None:
        session = SessionId.of(session)
        self._check_owned(session)
        if session not in self._infos:
            raise SessionError("there is none of this name", session)
        self._check_written(session)
        if session in self._in_use:
            raise SessionInUseError("is answering a request", session, advice="wait for its end")
        self._forget(session)

    def _set(self, info: SessionInfo) -> None:
        """Add or replace a session, now the most recently used one."""
        self._infos.pop(info.id, None)
        self._infos[info.id] = info
        self._sizes[info.id.owner].set(info.id, info.sizes)

    def _forget(self, session: SessionId) -> None:
        if self._files is not None:
            self._files.delete(session)
        self._held.pop(session, None)
        del self._infos[session]
        self._sizes[session.owner].pop(session)

    @_with_lock
    def _store(
        self, session_id: SessionId, session: Session, new: bool = False, source: SessionId | None = None
    ) -> Future[None]:
        self._check_owned(session_id)
        if new and session_id in self._infos:
            raise SessionError("exists already", session_id, advice="delete it, or choose another name")
        if new and session_id in self._in_use:
            raise SessionError("is answering its first request", session_id, advice="choose another name")
        self._check_written(session_id)
        nbytes = session.nbytes - self._count_shared(session_id, source)
        self._make_room(session_id, nbytes, source)
        if self._files is None:
            self._publish(session_id, session, info_of(session_id, session, FileSizes(nbytes)))
            return make_done_future()
        self._writing[session_id] = nbytes
        return self.writer.submit(lambda: self._write(session_id, session))

    def _count_shared(self, session: SessionId, source: SessionId | None) -> int:
        """The bytes of files that a fork has in common with its source."""
        info = self._infos.get(source) if source is not None and source.owner == session.owner else None
        return sum(info.sizes.segments.values()) if info is not None else 0

    def _write(self, session_id: SessionId, session: Session) -> None:
        assert self._files is not None
        try:
            self._check_alone(session_id)
            self._publish(session_id, session, self._files.write(session_id, session))
        except SessionError:
            raise
        except UsageError as error:  # which names the file
            _log.warning("%r cannot be written: %s", session_id, error)
            raise SessionUnwritableError("its file cannot be written", session_id) from error
        finally:
            del self._writing[session_id]

    def _check_alone(self, session: SessionId) -> None:
        """Refuse to replace a turn that another process has written."""
        assert self._files is not None
        if not self._files.path(session).exists():
            return
        info, known = self._files.find(session), self._infos.get(session)
        if info is None or (known is not None and info.turns == known.turns):
            return
        with self._lock:
            self._set(info)
            self._held.pop(session, None)
        raise SessionError("another process has continued it", session, advice="ask again")

    @_with_lock
    def _publish(self, session_id: SessionId, session: Session, info: SessionInfo) -> None:
        self._set(info)
        self._hold(session_id, session)

    def _check_owned(self, session: SessionId) -> None:
        if not self._owns(session.name):
            raise SessionError("belongs to another engine of this folder", session, advice="ask that one")

    def _check_written(self, session: SessionId) -> None:
        if session in self._writing:
            raise SessionError("its last turn is being written", session, advice="wait for its end")

    def _expire(self) -> None:
        """Delete sessions that were idle for too long."""
        now = time.time()
        if self._days is None or abs(now - self._expired) < EXPIRY_SECONDS:
            return
        self._expired = now
        for info in [info for info in self._infos.values() if info.updated < now - self._days * DAY]:
            if not self._is_busy(info.id):
                self._evict(info.id, "days")

    def _make_room(self, session: SessionId | None = None, nbytes: int = 0, source: SessionId | None = None) -> None:
        """Delete sessions until all fit, with this one: of the owner that has most, the least recently used one.

        Sessions in use stay, and so does the `source` of a fork. If it does not fit with these, nothing is deleted.
        """
        coming = self._writing | self._in_use | ({} if session is None else {session: nbytes})
        known = {each: info.nbytes for each in coming if (info := self._infos.get(each)) is not None}
        coming = {each: size - known.get(each, 0) for each, size in coming.items() if size > known.get(each, 0)}
        excess = self.nbytes + sum(coming.values()) - self._most
        if excess <= 0:
            return
        idle = [info for info in self._infos.values() if not (info.id in (session, source) or self._is_busy(info.id))]
        if session in coming and session not in self._in_use and self._count_freed(idle) < excess:
            room = f"its {nbytes:,} bytes do not fit with the sessions in use"
            raise SessionStorageFullError(
                f"{room}, with {self._most:,} for all of them", session, advice="try again later"
            )
        owners = Counter({owner: sizes.nbytes for owner, sizes in self._sizes.items()})
        for each, size in coming.items():
            owners[each.owner] += size
        queues: dict[str, list[SessionInfo]] = {}
        for info in reversed(idle):
            queues.setdefault(info.id.owner, []).append(info)
        while excess > 0 and queues:
            owner = max(queues, key=lambda owner: owners[owner])
            info = queues[owner].pop()
            if not queues[owner]:
                del queues[owner]
            freed = self._count_freed([info])
            if self._evict(info.id, "bytes"):
                owners[owner] -= freed
                excess -= freed

    def _count_freed(self, infos: list[SessionInfo]) -> int:
        """The bytes that are free when these sessions are deleted."""
        return sum(sizes.count_freed(info.id for info in infos) for sizes in self._sizes.values())

    def _is_busy(self, session: SessionId) -> bool:
        return session in self._in_use or session in self._writing or session in self._stuck

    def _evict(self, session: SessionId, limit: str) -> bool:
        """Delete a session; returns whether that was possible. If not, it is not tried again."""
        try:
            self._forget(session)
        except OSError as error:
            _log.warning("%r cannot be deleted: %s", session, error)
            self._stuck.add(session)
            return False
        self.evicted[limit] += 1
        return True

    def _hold(self, session_id: SessionId, session: Session) -> None:
        """Hold a session in memory, and drop the least recently used ones that are in files."""
        self._held[session_id] = session
        self._held.move_to_end(session_id)
        while self._files is not None and sum(held.nbytes for held in self._held.values()) > self._memory:
            self._held.popitem(last=False)
