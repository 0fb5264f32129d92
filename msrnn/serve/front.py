"""One address for several replicas of a server.

A session has one replica, and requests of one beginning go to the same replica. A request whose replica is lost before
the answer begins is sent again; if the answer has begun, the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, NamedTuple, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import msrnn
from msrnn.engine.sessions import check_name
from msrnn.errors import UsageError
from msrnn.serve.affinity import Beginnings, chosen, owner, text_of
from msrnn.serve.application import application
from msrnn.serve.errors import ApiError, failed, shutting_down
from msrnn.serve.limits import Limits, parsed, read_body
from msrnn.serve.metrics import merged
from msrnn.serve.page import page_routes
from msrnn.serve.replies import sent_error

PING_SECONDS, PING_TIMEOUT = 1.0, 10.0
PATIENCE = 300.0  # seconds that a request waits for a replica that is being started again
ATTEMPTS = 3  # replicas that one request may lose
SESSIONS = "/v1/sessions"
PROMPTS = ("/v1/chat/completions", "/v1/completions")


class LostReplicaError(Exception):
    """A replica has ended before its answer."""


class Replica(Protocol):
    """A server in another process; what it is asked after its end raises LostReplicaError, or waits for the next."""

    def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]: ...
    async def ping(self) -> None: ...


class _Job(NamedTuple):
    scope: Scope
    body: bytes
    replica: int | None = None  # None: any
    text: str = ""  # what decides in that case


class Front:
    """Sends each request on to a replica, and its answer back.

    sessions  whether the replicas keep sessions in a folder; without one they would end with a replica, so that
              requests with a session are refused
    """

    def __init__(self, replicas: Sequence[Replica], limits: Limits, sessions: bool) -> None:
        self.replicas, self.limits, self.keeps_sessions = replicas, limits, sessions
        self.up = [True] * len(replicas)
        self.loads = [0] * len(replicas)
        self.beginnings = Beginnings()
        self.active = 0  # requests under way
        self.draining = False  # no more are taken

    def app(self) -> Starlette:
        routes = [
            Route("/v1/{rest:path}", _Forward(self)),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            *page_routes(),
        ]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            watching = [asyncio.ensure_future(self._watch(number)) for number in range(len(self.replicas))]
            yield
            for task in watching:
                task.cancel()

        return application(routes, self.limits, lifespan)

    async def health(self, _: Request) -> Response:
        counts = {"replicas": len(self.replicas), "replicas_up": sum(self.up)}
        if self.draining:
            return JSONResponse({"status": "shutting down", **counts}, 503)
        status = "ok" if any(self.up) else "failing"
        return JSONResponse({"status": status, **counts}, 200 if any(self.up) else 503)

    async def metrics(self, _: Request) -> Response:
        """Those of all replicas that are up, with the number of the replica as a label."""
        numbers = [number for number, up in enumerate(self.up) if up]
        found = await asyncio.gather(*(self._asked(number, "GET", "/metrics") for number in numbers))
        texts = {number: body.decode() for number, (_, body) in zip(numbers, found, strict=True)}
        return Response(merged(texts), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": msrnn.__version__})

    async def _watch(self, number: int) -> None:
        while True:
            try:
                await asyncio.wait_for(self.replicas[number].ping(), PING_TIMEOUT)
                self.up[number] = True
            except (LostReplicaError, TimeoutError):
                self.up[number] = False
            await asyncio.sleep(PING_SECONDS)

    async def job(self, http: Request) -> _Job | Response:
        """Where a request goes; or its answer, if that comes from all replicas."""
        if self.draining:
            raise shutting_down()
        scope, path = _plain(http.scope), http.url.path
        body = await read_body(http, self.limits)
        if path == SESSIONS and http.method == "GET":
            return await self._all_sessions()
        if path.startswith(SESSIONS + "/"):
            name, _, action = path[len(SESSIONS) + 1 :].partition("/")
            return _Job(scope, body, self._owner(_target(body) or name if action == "fork" else name))
        if path not in PROMPTS or http.method != "POST":
            return _Job(scope, body)
        fields = await asyncio.to_thread(parsed, body)
        session = fields.get("session_id") if isinstance(fields, dict) else None
        if not isinstance(session, str):
            return _Job(scope, body, text=text_of(fields))
        number = self._owner(session)
        if fields.get("session_turns") is None:
            # If this replica is lost after it has saved the turn, the request must not be read twice.
            body = json.dumps({**fields, "session_turns": await self._turns(number, session)}).encode()
        return _Job(scope, body, number)

    def _owner(self, name: str) -> int:
        if not self.keeps_sessions:
            message = "this server has several replicas and no folder for sessions: start it with --sessions FOLDER"
            raise ApiError(400, message, param="session_id", code="no_sessions")
        return owner(name, len(self.replicas))

    async def _turns(self, number: int, name: str) -> int:
        try:
            check_name(name)
        except UsageError as error:
            raise ApiError(400, str(error), param="session_id", code="invalid_value") from error
        status, body = await self._asked(number, "GET", f"{SESSIONS}/{name}")
        return int(json.loads(body)["turns"]) if status == 200 else 0

    async def _all_sessions(self) -> Response:
        numbers = range(len(self.replicas)) if self.keeps_sessions else ()
        found = await asyncio.gather(*(self._asked(number, "GET", SESSIONS) for number in numbers))
        listed = [session for _, body in found for session in json.loads(body)["data"]]
        return JSONResponse({"object": "list", "data": sorted(listed, key=lambda session: -session["updated"])})

    async def _asked(self, number: int, method: str, path: str) -> tuple[int, bytes]:
        """A short question of our own to one replica: its status and body."""
        scope = _plain({"type": "http", "method": method, "path": path, "query_string": b"", "headers": []})
        status, body = 500, b""
        async with aclosing(self.answered(_Job(scope, b"", number))) as messages:
            async for message in messages:
                status, body = message.get("status", status), body + message.get("body", b"")
        return status, body

    async def answered(self, job: _Job) -> AsyncGenerator[Message, None]:
        """The answer's messages, from a second replica if the first is lost before the first part of the body."""
        for _ in range(ATTEMPTS):
            number = await self._available(job)
            self.loads[number] += 1
            begun = None
            try:
                async with aclosing(self.replicas[number].answer(job.scope, job.body)) as messages:
                    async for message in messages:
                        if message["type"] == "http.response.start":
                            begun = [message]
                            continue
                        if begun:
                            yield begun.pop()
                        yield message
                return
            except LostReplicaError:
                self.up[number] = False
                if begun == []:
                    raise
            finally:
                self.loads[number] -= 1
        raise failed(f"{ATTEMPTS} replicas ended while they answered this request")

    async def _available(self, job: _Job) -> int:
        """The number of a replica that is up; waits while there is none."""
        waited = 0.0
        while waited < PATIENCE:
            if job.replica is not None:
                if self.up[job.replica]:
                    return job.replica
            elif any(self.up):
                loads = {number: load for number, load in enumerate(self.loads) if self.up[number]}
                number = chosen(self.beginnings, job.text, loads)
                self.beginnings.add(job.text, number)
                return number
            await asyncio.sleep(0.05)
            waited += 0.05
        message = "the replica for this request is being started again: try later"
        raise ApiError(503, message, kind="server_error", code="replica_down", headers={"Retry-After": "10"})


class _Forward:
    """The ASGI application of everything below /v1."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, begun = self._front, False

        async def relay() -> None:
            nonlocal begun
            job = await front.job(Request(scope, receive))
            if isinstance(job, Response):
                return await job(scope, receive, send)
            gone = asyncio.ensure_future(_disconnected(receive))
            work = asyncio.ensure_future(pass_on(job))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                for task in (work, gone):
                    task.cancel()
                with suppress(BaseException):
                    await asyncio.gather(work, gone, return_exceptions=True)

        async def pass_on(job: _Job) -> None:
            nonlocal begun
            async with aclosing(front.answered(job)) as messages:
                async for message in messages:
                    begun = True
                    await send(message)

        front.active += 1
        try:
            await relay()
        except ClientDisconnect:
            pass
        except ApiError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
        except LostReplicaError:
            lost = failed("the replica that answered has ended: ask again")
            await send({"type": "http.response.body", "body": sent_error(lost.body), "more_body": False})
        finally:
            front.active -= 1


def _plain(scope: Scope) -> dict[str, Any]:
    """The fields of a request that another process needs."""
    names = ("type", "method", "path", "query_string", "headers")
    return {"http_version": "1.1", "root_path": "", "scheme": "http", **{name: scope[name] for name in names}}


def _target(body: bytes) -> str | None:
    """The session that a fork makes; its replica makes it, from the other one's file."""
    with suppress(ApiError):
        fields = parsed(body)
        if isinstance(fields, dict) and isinstance(fields.get("to"), str):
            return str(fields["to"])
    return None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
