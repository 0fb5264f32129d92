"""API keys of requests, and the owner of the sessions and cached prefixes that a request makes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from msrnn.server.errors import ApiError

GUARDED = ("/v1", "/tokenize", "/detokenize")
OWNER = "msrnn.owner"  # in a scope; a client cannot set it


class KeyCheck:
    """ASGI middleware. Keys are compared by digest, all of them, in a time that does not depend on them."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._owners = {_digest(key.encode()): _owner(key.encode()) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._owners and is_guarded(scope["path"]):
            owner = self._find_owner(scope)
            if owner is None:
                message = "wrong or missing API key: send 'Authorization: Bearer KEY'"
                error = ApiError(401, message, code="invalid_api_key")
                await JSONResponse(error.body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope = {**scope, OWNER: owner}
        await self._app(scope, receive, send)

    def _find_owner(self, scope: Scope) -> str | None:
        sent = b"".join(value for name, value in scope["headers"] if name == b"authorization")
        kind, _, key = sent.partition(b" ")
        digest = _digest(key.strip())
        matches = [owner for known, owner in self._owners.items() if hmac.compare_digest(digest, known)]
        return matches[0] if kind.lower() == b"bearer" and matches else None


def owner_of(scope: Scope) -> str:
    """The owner of sessions and states that a request makes: its key; all requests without a key are one owner."""
    return str(scope.get(OWNER, ""))


def _owner(key: bytes) -> str:
    """A name for the key, also of a folder: 16 hexadecimal digits."""
    return _digest(b"owner of sessions " + key).hex()[:16]


def is_guarded(path: str) -> bool:
    return any(path == guarded or path.startswith(guarded + "/") for guarded in GUARDED)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
