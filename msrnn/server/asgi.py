"""The ASGI application that server and router share: origin check, key check, OpenAI's errors, no redirects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from msrnn.server.errors import ApiError
from msrnn.server.keys import KeyCheck
from msrnn.server.limits import Limits
from msrnn.server.missing_paths import is_partly_served, missing_path_error
from msrnn.server.origins import OriginCheck


def make_app(routes: Sequence[Route], limits: Limits, lifespan: Callable[[Starlette], Any]) -> Starlette:
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(OriginCheck, origins=limits.origins, keyed=bool(limits.keys)),
            Middleware(KeyCheck, keys=limits.keys),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a wrong path is an error
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = ApiError(error.status_code, error.detail)
    path = request.url.path
    if error.status_code == 404 or (error.status_code == 405 and is_partly_served(path)):
        found = missing_path_error(path, request.method)
    return JSONResponse(found.body, found.status, error.headers)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
