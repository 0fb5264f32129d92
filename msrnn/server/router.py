"""The router: one address for several replicas of a server.

A session has one replica. Prompts with a common prefix go to the same replica, which has the prefix in its cache. A
request whose replica is lost before the answer begins is sent again; if the answer has begun, the stream ends with an
error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Scope

import msrnn
from msrnn.engine.session_id import SessionId
from msrnn.errors import UsageError
from msrnn.server.affinity import SeenPrefixes, assign_replica, blocks_of, choose_replica, text_of
from msrnn.server.asgi import make_app
from msrnn.server.docs_page import docs_routes
from msrnn.server.errors import ApiError, internal_error
from msrnn.server.keys import OWNER, owner_of
from msrnn.server.limits import Limits, Parsing, parse_small_json
from msrnn.server.metrics import merge_metrics
from msrnn.server.openapi import PATH as OPENAPI
from msrnn.server.openapi import add_keys
from msrnn.server.page import page_routes
from msrnn.server.proxy import Proxy
from msrnn.server.sessions import MOST, page_of
from msrnn.server.sessions import PATH as SESSIONS

PING_SECONDS, PING_TIMEOUT, METRICS_TIMEOUT = 1.0, 10.0, 5.0
PATIENCE = 300.0  # seconds that a request waits for a replica that is being started again
ATTEMPTS = 3  # replicas that one request may lose
PROMPTS = ("/v1/chat/completions", "/v1/completions")


class LostReplicaError(Exception):
    """A replica has ended before its answer was complete."""


class Replica(Protocol):
    """A server in another process. After its end, calls raise LostReplicaError or wait until it is started again."""

    def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]: ...
    async def ping(self) -> None: ...


@dataclass(frozen=True)
class _Job:
    scope: Scope
    body: bytes
    replica: int | None = None  # None: any
    blocks: Sequence[bytes] = ()  # of the prompt: its prefixes decide in that case
    repeats: bool = True  # whether it may be sent again if its replica is lost
    until: float = field(default_factory=lambda: monotonic() + PATIENCE)  # when it no longer waits for a replica


class Router:
    """Forwards each request to a replica, and the answer to the client.

    sessions  whether the replicas keep sessions in a folder. Without one a session would end with its replica, so
              requests with a session are refused
    """

    def __init__(self, replicas: Sequence[Replica], limits: Limits, sessions: bool) -> None:
        self.replicas, self.limits, self.keeps_sessions = replicas, limits, sessions
        self.up = [True] * len(replicas)
        self._down = [asyncio.Event() for _ in replicas]
        self.loads = [0] * len(replicas)
        self.prefixes = SeenPrefixes()
        self.parsing = Parsing()
        self.active = 0  # running requests
        self.draining = False  # new requests are refused
        self.ending = asyncio.Event()  # running requests end with an error

    def app(self) -> Starlette:
        routes = [
            Route("/v1/{rest:path}", Proxy(self)),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route(OPENAPI, self.read_openapi, methods=["GET"]),
            *page_routes(),
            *docs_routes(),
        ]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            watching = [asyncio.ensure_future(self._watch(number)) for number in range(len(self.replicas))]
            yield
            for task in watching:
                task.cancel()

        return make_app(routes, self.limits, lifespan)

    def end_answers(self) -> None:
        self.ending.set()

    async def health(self, _: Request) -> Response:
        counts = {"replicas": len(self.replicas), "replicas_up": sum(self.up)}
        if self.draining:
            return JSONResponse({"status": "shutting down", **counts}, 503)
        status = "ok" if any(self.up) else "failing"
        return JSONResponse({"status": status, **counts}, 200 if any(self.up) else 503)

    async def metrics(self, _: Request) -> Response:
        """The metrics of all replicas that answer in time, with the number of the replica as a label."""
        numbers = [number for number, up in enumerate(self.up) if up]
        asked = (asyncio.wait_for(self._ask(number, "/metrics"), METRICS_TIMEOUT) for number in numbers)
        found = await asyncio.gather(*asked, return_exceptions=True)
        pairs = zip(numbers, found, strict=True)
        texts = {number: one[1].decode() for number, one in pairs if not isinstance(one, BaseException)}
        return Response(merge_metrics(texts), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def read_openapi(self, _: Request) -> Response:
        """The description of any replica, since all serve the same; the router checks keys."""
        try:
            status, body = await asyncio.wait_for(self._ask(None, OPENAPI), METRICS_TIMEOUT)
        except (TimeoutError, LostReplicaError, ApiError):
            return JSONResponse(_replica_down_error().body, 503)
        document = json.loads(body)
        return JSONResponse(add_keys(document) if status == 200 and self.limits.keys else document, status)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": msrnn.__version__})

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

    async def job(self, http: Request, body: bytes) -> _Job | Response:
        """The job of a request and its replica; or the answer, where it is made from all replicas."""
        scope, path = _copy_scope(http.scope), http.url.path
        if path == SESSIONS and http.method == "GET":
            return JSONResponse(page_of(await self._all_sessions(owner_of(scope)), http.query_params))
        if path.startswith(SESSIONS + "/"):
            name, _, action = path[len(SESSIONS) + 1 :].partition("/")
            number = self._find_session_replica(_fork_target(body) or name if action == "fork" else name)
            return _Job(scope, body, number, repeats=http.method == "GET")
        if path not in PROMPTS or http.method != "POST":
            return _Job(scope, body)
        read = partial(_read_prompt, key_owner=owner_of(scope))
        fields, blocks = await self.parsing.run(body, read, sys.maxsize)  # replicas count the requests
        session = fields.get("session_id") if isinstance(fields, dict) else None
        if not isinstance(session, str):
            return _Job(scope, body, blocks=blocks)
        number = self._find_session_replica(session)
        if fields.get("session_turns") is None:
            # If this replica is lost after it has saved the turn, the request must not be read twice.
            turns = await self._turns(number, session, owner_of(scope))
            body = await asyncio.to_thread(lambda: json.dumps({**fields, "session_turns": turns}).encode())
        return _Job(scope, body, number)

    def _find_session_replica(self, name: str) -> int:
        if not self.keeps_sessions:
            message = "this server has several replicas and no folder for sessions: start it with --sessions FOLDER"
            raise ApiError(400, message, param="session_id", code="no_sessions")
        try:
            SessionId(name).check()
        except UsageError as error:
            raise ApiError(400, str(error), param="session_id", code="invalid_value") from error
        return assign_replica(name, len(self.replicas))

    async def _turns(self, number: int, name: str, key_owner: str) -> int:
        status, body = await self._ask(number, f"{SESSIONS}/{name}", key_owner)
        if status not in (200, 404):
            raise _replica_down_error()
        return int(json.loads(body)["turns"]) if status == 200 else 0

    async def _all_sessions(self, key_owner: str) -> list[dict[str, Any]]:
        numbers = range(len(self.replicas)) if self.keeps_sessions else ()
        found = await asyncio.gather(*(self._sessions_of(number, key_owner) for number in numbers))
        listed = [session for sessions in found for session in sessions]
        return sorted(listed, key=lambda session: (-session["updated"], session["id"]))

    async def _sessions_of(self, number: int, key_owner: str) -> list[dict[str, Any]]:
        """All sessions of a replica, page by page."""
        found: list[dict[str, Any]] = []
        query, more = f"limit={MOST}", True
        while more:
            status, body = await self._ask(number, SESSIONS, key_owner, query)
            if status == 400 and found:  # the last one was deleted meanwhile
                found, query = [], f"limit={MOST}"
                continue
            if status != 200:
                raise _replica_down_error()
            page = json.loads(body)
            found, more = found + page["data"], page["has_more"]
            query = f"limit={MOST}&after={found[-1]['id']}" if found else ""
        return found

    async def _ask(self, number: int | None, path: str, key_owner: str = "", query: str = "") -> tuple[int, bytes]:
        """Send a GET request of the router's own to one replica, or to any: its status and body."""
        about = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": []}
        scope = _copy_scope({**about, OWNER: key_owner})
        status, body = 500, b""
        async with aclosing(self.stream_answer(_Job(scope, b"", number))) as messages:
            async for message in messages:
                status, body = message.get("status", status), body + message.get("body", b"")
        return status, body

    async def stream_answer(self, job: _Job) -> AsyncGenerator[Message, None]:
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
                            raise _replica_down_error() from None
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

    async def _pick_replica(self, job: _Job) -> int:
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
        raise _replica_down_error()


def _copy_scope(scope: Scope) -> dict[str, Any]:
    """Copy the fields of a scope that a replica needs."""
    names = ("type", "method", "path", "query_string", "headers")
    about = {"http_version": "1.1", "root_path": "", "scheme": "http", OWNER: owner_of(scope)}
    return {**about, **{name: scope[name] for name in names}}


def _read_prompt(fields: Any, key_owner: str) -> tuple[Any, list[bytes]]:
    """The fields of a request, and the blocks of its prompt."""
    return fields, blocks_of(text_of(fields), key_owner)


def _replica_down_error() -> ApiError:
    message = "the replica for this request is being started again: try later"
    return ApiError(503, message, kind="server_error", code="replica_down", headers={"Retry-After": "10"})


def _fork_target(body: bytes) -> str | None:
    """The new session of a fork: its replica makes it, from the file of the old one."""
    with suppress(ApiError):
        fields = parse_small_json(body)
        if isinstance(fields, dict) and isinstance(fields.get("to"), str):
            return str(fields["to"])
    return None
