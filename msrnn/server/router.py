"""The router: one address for several replicas of a server.

A session has one replica. Prompts with a common prefix go to the same replica, which has the prefix in its cache. A
request whose replica is lost before the answer begins is sent again; if the answer has begun, the stream ends with an
error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import msrnn
from msrnn.engine.session_id import SessionId
from msrnn.errors import UsageError
from msrnn.server.affinity import assign_replica, blocks_of, text_of
from msrnn.server.asgi import make_app
from msrnn.server.docs_page import docs_routes
from msrnn.server.errors import ApiError
from msrnn.server.keys import owner_of
from msrnn.server.limits import Limits, Parsing, parse_small_json
from msrnn.server.metrics import merge_metrics
from msrnn.server.openapi import PATH as OPENAPI
from msrnn.server.openapi import add_keys
from msrnn.server.page import page_routes
from msrnn.server.proxy import Proxy
from msrnn.server.replica_pool import (
    LostReplicaError,
    Replica,
    ReplicaPool,
    RoutedRequest,
    copy_scope,
    replica_down_error,
)
from msrnn.server.response_ids import parse_response_id
from msrnn.server.responses import PATH as RESPONSES
from msrnn.server.sessions import MOST, page_of
from msrnn.server.sessions import PATH as SESSIONS

METRICS_TIMEOUT = 5.0
PROMPTS = ("/v1/chat/completions", "/v1/completions", RESPONSES)


class Router:
    """Forwards each request to a replica, and the answer to the client.

    sessions  whether the replicas keep sessions in a folder. Without one a session would end with its replica, so
              requests with a session are refused
    """

    def __init__(self, replicas: Sequence[Replica], limits: Limits, sessions: bool) -> None:
        self.pool, self.limits, self.keeps_sessions = ReplicaPool(replicas), limits, sessions
        self.parsing = Parsing()
        self.active = 0  # running requests
        self.draining = False  # new requests are refused
        self.ending = asyncio.Event()  # running requests end with an error

    def app(self) -> Starlette:
        routes = [
            *(Route(path, Proxy(self)) for path in ("/v1/{rest:path}", "/tokenize", "/detokenize")),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route(OPENAPI, self.read_openapi, methods=["GET"]),
            *page_routes(),
            *docs_routes(),
        ]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with self.pool.watching():
                yield

        return make_app(routes, self.limits, lifespan)

    def end_answers(self) -> None:
        self.ending.set()

    async def health(self, _: Request) -> Response:
        counts = {"replicas": len(self.pool.replicas), "replicas_up": sum(self.pool.up)}
        if self.draining:
            return JSONResponse({"status": "shutting down", **counts}, 503)
        status = "ok" if any(self.pool.up) else "failing"
        return JSONResponse({"status": status, **counts}, 200 if any(self.pool.up) else 503)

    async def metrics(self, _: Request) -> Response:
        """The metrics of all replicas that answer in time, with the number of the replica as a label."""
        numbers = [number for number, up in enumerate(self.pool.up) if up]
        asked = (asyncio.wait_for(self.pool.ask(number, "/metrics"), METRICS_TIMEOUT) for number in numbers)
        found = await asyncio.gather(*asked, return_exceptions=True)
        pairs = zip(numbers, found, strict=True)
        texts = {number: one[1].decode() for number, one in pairs if not isinstance(one, BaseException)}
        return Response(merge_metrics(texts), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def read_openapi(self, _: Request) -> Response:
        """The description of any replica, since all serve the same; the router checks keys."""
        try:
            status, body = await asyncio.wait_for(self.pool.ask(None, OPENAPI), METRICS_TIMEOUT)
        except (TimeoutError, LostReplicaError, ApiError):
            return JSONResponse(replica_down_error().body, 503)
        document = json.loads(body)
        return JSONResponse(add_keys(document) if status == 200 and self.limits.keys else document, status)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": msrnn.__version__})

    async def job(self, http: Request, body: bytes) -> RoutedRequest | Response:
        """The job of a request and its replica; or the answer, where it is made from all replicas."""
        scope, path = copy_scope(http.scope), http.url.path
        if path == SESSIONS and http.method == "GET":
            return JSONResponse(page_of(await self._all_sessions(owner_of(scope)), http.query_params))
        if path.startswith(SESSIONS + "/"):
            name, _, action = path[len(SESSIONS) + 1 :].partition("/")
            number = self._find_session_replica(_fork_target(body) or name if action == "fork" else name)
            return RoutedRequest(scope, body, number, repeats=http.method == "GET")
        if path.startswith(RESPONSES + "/") and (response := parse_response_id(path[len(RESPONSES) + 1 :])):
            return RoutedRequest(scope, body, self._find_session_replica(response.session), repeats=False)
        if path not in PROMPTS or http.method != "POST":
            return RoutedRequest(scope, body)
        read = partial(_read_prompt, key_owner=owner_of(scope))
        fields, blocks = await self.parsing.run(body, read, sys.maxsize)  # replicas count the requests
        if path == RESPONSES:
            return RoutedRequest(scope, body, self._find_response_replica(fields), blocks)
        session = fields.get("session_id") if isinstance(fields, dict) else None
        if not isinstance(session, str):
            return RoutedRequest(scope, body, blocks=blocks)
        number = self._find_session_replica(session)
        if fields.get("session_turns") is None:
            # If this replica is lost after it has saved the turn, the request must not be read twice.
            turns = await self._turns(number, session, owner_of(scope))
            body = await asyncio.to_thread(lambda: json.dumps({**fields, "session_turns": turns}).encode())
        return RoutedRequest(scope, body, number)

    def _find_response_replica(self, fields: Any) -> int | None:
        """The replica of the conversation that a response continues. Any may begin one: it makes a name of its own."""
        if not isinstance(fields, dict) or fields.get("store") is False:
            return None
        self._check_sessions("store", "send store: false, or ")
        previous = fields.get("previous_response_id")
        response = parse_response_id(previous) if isinstance(previous, str) else None
        return None if response is None else self._find_session_replica(response.session)

    def _check_sessions(self, param: str, advice: str = "") -> None:
        if not self.keeps_sessions:
            reason = "this server has several replicas and no folder for sessions"
            message = f"{reason}: {advice}start it with --sessions FOLDER"
            raise ApiError(400, message, param=param, code="no_sessions")

    def _find_session_replica(self, name: str) -> int:
        self._check_sessions("session_id")
        try:
            SessionId(name).check()
        except UsageError as error:
            raise ApiError(400, str(error), param="session_id", code="invalid_value") from error
        return assign_replica(name, len(self.pool.replicas))

    async def _turns(self, number: int, name: str, key_owner: str) -> int:
        status, body = await self.pool.ask(number, f"{SESSIONS}/{name}", key_owner)
        if status not in (200, 404):
            raise replica_down_error()
        return int(json.loads(body)["turns"]) if status == 200 else 0

    async def _all_sessions(self, key_owner: str) -> list[dict[str, Any]]:
        numbers = range(len(self.pool.replicas)) if self.keeps_sessions else ()
        found = await asyncio.gather(*(self._sessions_of(number, key_owner) for number in numbers))
        listed = [session for sessions in found for session in sessions]
        return sorted(listed, key=lambda session: (-session["updated"], session["id"]))

    async def _sessions_of(self, number: int, key_owner: str) -> list[dict[str, Any]]:
        """All sessions of a replica, page by page."""
        found: list[dict[str, Any]] = []
        query, more = f"limit={MOST}", True
        while more:
            status, body = await self.pool.ask(number, SESSIONS, key_owner, query)
            if status == 400 and found:  # the last one was deleted meanwhile
                found, query = [], f"limit={MOST}"
                continue
            if status != 200:
                raise replica_down_error()
            page = json.loads(body)
            found, more = found + page["data"], page["has_more"]
            query = f"limit={MOST}&after={found[-1]['id']}" if found else ""
        return found


def _read_prompt(fields: Any, key_owner: str) -> tuple[Any, list[bytes]]:
    """The fields of a request, and the blocks of its prompt."""
    return fields, blocks_of(text_of(fields), key_owner)


def _fork_target(body: bytes) -> str | None:
    """The new session of a fork: its replica makes it, from the file of the old one."""
    with suppress(ApiError):
        fields = parse_small_json(body)
        if isinstance(fields, dict) and isinstance(fields.get("to"), str):
            return str(fields["to"])
    return None
