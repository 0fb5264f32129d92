"""Endpoints of sessions: list, show, stop, fork, delete. Each API key sees its own sessions only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import QueryParams
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from msrnn.engine.engine import Engine
from msrnn.engine.session_files import SessionInfo
from msrnn.engine.session_id import SessionId
from msrnn.server.errors import ApiError, bad_value
from msrnn.server.keys import owner_of
from msrnn.server.limits import Limits, parse_small_json, read_body
from msrnn.server.request_models import ForkRequest
from msrnn.server.retention import describe_retention

PATH = "/v1/sessions"
USUAL, MOST = 100, 1000  # sessions on a page of the list

Endpoint = Callable[[HttpRequest], Any]
Guard = Callable[[Endpoint], Endpoint]  # what a server puts around each endpoint


class SessionEndpoints:
    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits

    def routes(self, guard: Guard) -> list[Route]:
        return [
            Route(PATH, guard(self.list), methods=["GET"]),
            Route(f"{PATH}/{{name}}", guard(self.show), methods=["GET"]),
            Route(f"{PATH}/{{name}}", guard(self.delete), methods=["DELETE"]),
            Route(f"{PATH}/{{name}}/memory", guard(self.memory), methods=["GET"]),
            Route(f"{PATH}/{{name}}/fork", guard(self.fork), methods=["POST"]),
            Route(f"{PATH}/{{name}}/stop", guard(self.stop), methods=["POST"]),
        ]

    async def list(self, http: HttpRequest) -> Response:
        infos = self.engine.sessions.infos(owner_of(http.scope))
        return JSONResponse(page_of([*map(_describe_session, infos)], http.query_params))

    async def show(self, http: HttpRequest) -> Response:
        info = self.engine.sessions.info(session := _session(http))
        if info is None:
            raise _no_session(session)
        return JSONResponse(_describe_session(info))

    async def delete(self, http: HttpRequest) -> Response:
        session = self._find_session(http)
        await asyncio.to_thread(self.engine.sessions.delete, session)
        return JSONResponse({"id": session.name, "object": "session", "deleted": True})

    async def fork(self, http: HttpRequest) -> Response:
        session, body = self._find_session(http), parse_small_json(await read_body(http, self.limits))
        try:
            other = ForkRequest.model_validate(body).to
        except ValidationError:
            raise ApiError(400, 'the body must be {"to": "the name of the new session"}', param="to") from None
        await asyncio.to_thread(self.engine.sessions.fork, session, SessionId(other, session.owner))
        return JSONResponse({"id": other, "object": "session"}, 201)

    async def stop(self, http: HttpRequest) -> Response:
        """End the running answer as it is. Its turn is kept, unless the answer has no token yet."""
        session = _session(http)
        stopped = self.engine.stop_session(session)
        if not stopped and session not in self.engine.sessions:
            raise _no_session(session)
        return JSONResponse({"id": session.name, "object": "session", "stopped": stopped})

    async def memory(self, http: HttpRequest) -> Response:
        """The tokens that the session holds after its last finished turn; a running answer changes a copy."""
        name = self._find_session(http, idle=False)

        def read_memory() -> dict[str, Any]:
            session = self.engine.sessions.get(name)
            if session is None:  # deleted meanwhile
                raise _no_session(name)
            held = self.engine.executor.retention(session.state)
            return {"tokens": session.tokens, "turns": session.turns, **describe_retention(held)}

        return JSONResponse({"id": name.name, "object": "session.memory", **await asyncio.to_thread(read_memory)})

    def _find_session(self, http: HttpRequest, idle: bool = True) -> SessionId:
        """The session of a request; `idle`: no answer of it may be under way."""
        session = _session(http)
        if session not in self.engine.sessions:
            raise _no_session(session)
        if idle and self.engine.uses_session(session):
            raise ApiError(409, f"{session!r}: is answering a request; wait for its end", code="session_in_use")
        return session


def page_of(sessions: list[dict[str, Any]], query: QueryParams) -> dict[str, Any]:
    """One page of a list, as OpenAI's API has them: at most `limit` entries, those that follow the id `after`."""
    limit, after = query.get("limit", str(USUAL)), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= MOST):
        raise bad_value("limit", f"limit={limit!r:.100}: must be a whole number from 1 to {MOST:,}")
    start = 0
    if after is not None:
        start = next((place for place, session in enumerate(sessions, 1) if session["id"] == after), 0)
        if start == 0:
            raise bad_value(
                "after", f"after={after!r:.100}: there is no session of this name; list them from the first"
            )
    page = sessions[start : start + int(limit)]
    return {"object": "list", "data": page, "has_more": start + len(page) < len(sessions)}


def _session(http: HttpRequest) -> SessionId:
    session = SessionId(str(http.path_params["name"]), owner_of(http.scope))
    session.check()
    return session


def _describe_session(info: SessionInfo) -> dict[str, Any]:
    times = {"created": info.created, "updated": info.updated}
    counts = {"tokens": info.tokens, "turns": info.turns, **times, "bytes": info.nbytes}
    return {"id": info.name, "object": "session", "name": info.name, **counts, "positions": info.positions}


def _no_session(session: SessionId) -> ApiError:
    return ApiError(404, f"session {session.name!r:.80}: there is none of this name", code="session_not_found")
