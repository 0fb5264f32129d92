"""The replicas behind a router: which of them are up, and the answer of one of them to a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from starlette.types import Message, Scope

from msrnn.server.affinity import SeenPrefixes, choose_replica
from msrnn.server.errors import ApiError, internal_error
from msrnn.server.keys import OWNER, owner_of

PING_SECONDS, PING_TIMEOUT = 1.0, 10.0
PATIENCE = 300.0  # seconds that a request waits for a replica that is being started again
ATTEMPTS = 3  # replicas that one request may lose


class LostReplicaError(Exception):
    """A replica has ended before its answer was complete."""


class Replica(Protocol):
    """A server in another process. After its end, calls raise LostReplicaError or wait until it is started again."""

    def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]: ...
    async def ping(self) -> None: ...


@dataclass(frozen=True)
class RoutedRequest:
    """A request, and the replicas that may answer it."""

    scope: Scope
    body: bytes
    replica: int | None = None  # None: any
    blocks: Sequence[bytes] = ()  # of the prompt: its prefixes decide in that case
    repeats: bool = True  # whether it may be sent again if its replica is lost
    until: float = field(default_factory=lambda: monotonic() + PATIENCE)  # when it no longer waits for a replica


class ReplicaPool:
    """Sends each request to a replica that is up, and again to another one if the first is lost."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self.up = [True] * len(replicas)
        self._down = [asyncio.Event() for _ in replicas]
        self.loads = [0] * len(replicas)  # running requests
        self.prefixes = SeenPrefixes()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Ping all replicas meanwhile."""
        tasks = [asyncio.ensure_future(self._watch(number)) for number in range(len(self.replicas))]
        yield
        for task in tasks:
            task.cancel()

    async def _watch(self, number: int) -> None:
        while True:
            try:
                await asyncio.wait_for(self.replicas[number].ping(), PING_TIMEOUT)
                self.mark(number, up=True)
            except Exception:  # whatever it is, the replica does not answer
                self.mark(number, up=False)
            await asyncio.sleep(PING_SECONDS)

    def mark(self, number: int, *, up: bool) -> None:
        self.up[number] = up
        self._down[number].clear() if up else self._down[number].set()

    async def ask(self, number: int | None, path: str, key_owner: str = "", query: str = "") -> tuple[int, bytes]:
        """Send a GET request of the router's own to one replica, or to any: its status and body."""
        about = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": []}
        scope = copy_scope({**about, OWNER: key_owner})
        status, body = 500, b""
        async with aclosing(self.stream_answer(RoutedRequest(scope, b"", number))) as messages:
            async for message in messages:
                status, body = message.get("status", status), body + message.get("body", b"")
        return status, body

    async def stream_answer(self, job: RoutedRequest) -> AsyncGenerator[Message, None]:
        """Yield the answer's messages, from a second replica if the first is lost before the first part of the body.

        Raises LostReplicaError if the answer has begun and will not end.
        """
        for _ in range(ATTEMPTS):
            number = await self._pick_replica(job)
            self.loads[number] += 1
            try:
                async with aclosing(self.replicas[number].answer(job.scope, job.body)) as messages:
                    try:
                        first = [await self._next_message(number, messages), await self._next_message(number, messages)]
                    except LostReplicaError:
                        self.mark(number, up=False)
                        if not job.repeats:
                            raise replica_down_error() from None
                        continue
                    for message in first:
                        yield message
                    while message.get("more_body"):
                        message = await anext(messages)
                        yield message
                    return
            except LostReplicaError:
                self.mark(number, up=False)
                raise
            finally:
                self.loads[number] -= 1
        raise internal_error(f"{ATTEMPTS} replicas ended while they answered this request")

    async def _next_message(self, number: int, messages: AsyncGenerator[Message, None]) -> Message:
        """The next message. Raises LostReplicaError when a ping finds the replica down: its stream may just hang."""
        coming = asyncio.ensure_future(anext(messages))
        down = asyncio.ensure_future(self._down[number].wait())
        try:
            await asyncio.wait({coming, down}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise LostReplicaError
            return coming.result()
        finally:
            for task in (coming, down):
                task.cancel()
            await asyncio.gather(coming, down, return_exceptions=True)

    async def _pick_replica(self, job: RoutedRequest) -> int:
        """Choose a replica that is up for a job; waits while there is none."""
        while monotonic() < job.until:
            if job.replica is not None:
                if self.up[job.replica]:
                    return job.replica
            elif any(self.up):
                loads = {number: load for number, load in enumerate(self.loads) if self.up[number]}
                number = choose_replica(self.prefixes, job.blocks, loads)
                self.prefixes.add(job.blocks, number)
                return number
            await asyncio.sleep(0.05)
        raise replica_down_error()


def copy_scope(scope: Scope) -> dict[str, Any]:
    """Copy the fields of a scope that a replica needs."""
    names = ("type", "method", "path", "query_string", "headers")
    about = {"http_version": "1.1", "root_path": "", "scheme": "http", OWNER: owner_of(scope)}
    return {**about, **{name: scope[name] for name in names}}


def replica_down_error() -> ApiError:
    message = "the replica for this request is being started again: try later"
    return ApiError(503, message, kind="server_error", code="replica_down", headers={"Retry-After": "10"})
