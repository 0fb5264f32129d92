from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from msrnn.server.asgi import make_app
from msrnn.server.keys import owner_of
from msrnn.server.limits import Limits


async def show_owner(http: Request) -> Response:
    return JSONResponse({"owner": owner_of(http.scope)})


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    yield


def ask(path: str, limits: Limits, method: str = "GET", **headers: str) -> httpx.Response:
    app = make_app([Route("/v1/thing", show_owner, methods=["GET"])], limits, lifespan)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def error_of(found: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = found.json()["error"]
    return error


def test_errors_are_in_openais_shape() -> None:
    found = ask("/v1/nothing", Limits())
    assert found.status_code == 404
    error = error_of(found)
    message = "'/v1/nothing': there is no such path; there are POST /v1/chat/completions, "
    assert error.pop("message").startswith(message)
    assert error == {"type": "invalid_request_error", "param": None, "code": "not_found"}
    found = ask("/v1/thing", Limits(), "POST")
    assert (found.status_code, error_of(found)["code"]) == (405, None)
    assert {*found.headers["allow"].split(", ")} == {"GET", "HEAD"}


def test_there_are_no_redirects() -> None:
    assert ask("/v1/thing/", Limits()).status_code == 404


def test_origins_are_checked_before_keys() -> None:
    limits = Limits(keys=["secret"])
    assert ask("/v1/thing", limits, host="evil.example").status_code in (401, 403)
    assert ask("/v1/thing", Limits(), host="evil.example").status_code == 403
    assert ask("/v1/thing", limits).status_code == 401
    found = ask("/v1/thing", limits, authorization="Bearer secret")
    assert (found.status_code, len(found.json()["owner"])) == (200, 16)
