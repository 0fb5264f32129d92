"""Endpoints of responses that are there: one can be deleted, and with it the state that continues it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from msrnn.engine.engine import Engine
from msrnn.server.errors import ApiError
from msrnn.server.keys import owner_of
from msrnn.server.response_requests import find_response
from msrnn.server.sessions import Guard

PATH = "/v1/responses"


class ResponseEndpoints:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self, guard: Guard) -> list[Route]:
        return [Route(f"{PATH}/{{response}}", guard(self.delete), methods=["DELETE"])]

    async def delete(self, http: HttpRequest) -> Response:
        """Delete the newest response of a conversation; the state after earlier ones is not there any more."""
        name = str(http.path_params["response"])
        info, newest = find_response(name, self._engine.sessions, owner_of(http.scope))
        if info is None:
            reason = "there is none of this id" if newest is None else f"it was continued; the newest one is {newest}"
            raise ApiError(404, f"response {name!r:.100}: {reason}", code="response_not_found")
        if self._engine.uses_session(info.id):
            raise ApiError(409, f"response {name!r:.100}: is being continued; wait for the end", code="session_in_use")
        await asyncio.to_thread(self._engine.sessions.delete, info.id)
        return JSONResponse({"id": name, "object": "response", "deleted": True})
