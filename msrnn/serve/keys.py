"""API keys: a request to /v1 must have one of them, if there are any."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from msrnn.serve.errors import ApiError

GUARDED = "/v1"


class KeyCheck:
    """ASGI middleware. Keys are compared by digest, all of them, in a time that does not depend on them."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._digests = app, [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and _is_guarded(scope["path"]) and not self._knows(scope):
            error = ApiError(401, "wrong or missing API key: send 'Authorization: Bearer KEY'", code="invalid_api_key")
            await JSONResponse(error.body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        sent = b"".join(value for name, value in scope["headers"] if name == b"authorization")
        kind, _, key = sent.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(matches)


def _is_guarded(path: str) -> bool:
    return path == GUARDED or path.startswith(GUARDED + "/")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
