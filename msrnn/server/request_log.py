"""The request log: time, path, status, tokens and duration of each request; no texts, session names or keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from time import monotonic
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

USAGE = "msrnn.usage"  # in a scope: a list for what returns the tokens so far; in a message of a replica: these tokens
POLLED = ("/health", "/metrics")  # not logged while they are fine
CLOSED = 499  # the client left before its answer began
_SESSIONS, _ACTIONS = "/v1/sessions/", ("fork", "memory", "stop")
_RESPONSES = "/v1/responses/"
_LONGEST = 100  # characters of a path


class RequestLog:
    """ASGI middleware, around all others."""

    def __init__(self, app: ASGIApp, write: Callable[[str], None]) -> None:
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status, usage = monotonic(), CLOSED, dict[str, Any]()
        counted: list[Callable[[], dict[str, Any]]] = []

        async def record(message: Message) -> None:
            nonlocal status, usage
            status = message.get("status", status)
            usage = message.pop(USAGE, usage)
            await send(message)

        try:
            await self._app({**scope, USAGE: counted}, receive, record)
        finally:
            usage = counted[-1]() if counted else usage
            if scope["path"] not in POLLED or status >= 400:
                with suppress(OSError, ValueError):  # a log that cannot be written does not stop the server
                    self._write(_line(scope, status, usage, monotonic() - began))


def _line(scope: Scope, status: int, usage: dict[str, Any], seconds: float) -> str:
    parts = [f"{datetime.now():%Y-%m-%d %H:%M:%S} {quote(scope['method'])} {_path(scope['path'])} {status}"]
    if usage:
        parts.append(f"{usage['prompt_tokens']} prompt + {usage['completion_tokens']} completion tokens")
    return ", ".join([*parts, f"{1000 * seconds:.0f} ms"])


def _path(path: str) -> str:
    """The path without the name of a session or a response, and escaped, so that it cannot break the line."""
    if path.startswith(_RESPONSES):
        path = f"{_RESPONSES}{{response}}"
    if path.startswith(_SESSIONS):
        name, _, action = path[len(_SESSIONS) :].rpartition("/")
        path = f"{_SESSIONS}{{name}}/{action}" if name and action in _ACTIONS else f"{_SESSIONS}{{name}}"
    return quote(path[:_LONGEST], safe="/{}:@!$&'()*+,;=", errors="replace")
