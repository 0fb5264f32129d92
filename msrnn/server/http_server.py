"""Start and end of an HTTP server: bind before the model is loaded, listen, drain running answers at the end."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from time import monotonic
from types import FrameType
from typing import Any, Protocol

import uvicorn

from msrnn.errors import UsageError

BACKLOG = 2048  # connections that wait to be accepted
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WARN_SECONDS, _RETRY_SECONDS = 10.0, 0.5  # asyncio tries again after a second
_log = logging.getLogger(__name__)


class Listener(socket.socket):
    """A socket whose failures asyncio notices once: it calls accept thousands of times, also after an error."""

    _failed = -math.inf

    def accept(self) -> tuple[socket.socket, Any]:
        if monotonic() - self._failed < _RETRY_SECONDS:
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            if error.errno in _FULL:
                self._failed = monotonic()
            raise


def bind(host: str, port: int) -> Listener:
    """A bound socket that does not listen yet. It has TCP_NODELAY, so that a token is sent at once.

    asyncio sets this option only on sockets that it has made itself. Connections inherit it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # the latter for names that are too long
        reason = getattr(error, "strerror", None) or "not a name"
        raise UsageError(
            f"unknown ({reason})", name="host", value=host, advice="give an address of this machine"
        ) from error
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)  # as uvicorn does for names
    listener = Listener(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _address_error(error, host, port) from error
    return listener


def listen(listener: socket.socket, host: str) -> None:
    """Accept connections from now on. Fails if another program has bound the same address and listens already."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _address_error(error, host, listener.getsockname()[1]) from error


def _address_error(error: OSError, host: str, port: int) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(
            f"in use by another program on {host}",
            name="port",
            value=port,
            advice="choose another, or 0 for a free one",
        )
    if error.errno == errno.EACCES:
        return UsageError(
            "this user may not listen on it", name="port", value=port, advice="choose one from 1024 to 65535"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(
            "not an address of this machine", name="host", value=host, advice="0.0.0.0 is every address that it has"
        )
    return UsageError(f"cannot be used with port {port} ({error.strerror})", name="host", value=host)


class Drainable(Protocol):
    """A server or router."""

    active: int  # waiting and running requests
    draining: bool  # new requests are refused

    def end_answers(self) -> None:
        """End running answers with an error."""


class DrainingServer(uvicorn.Server):
    """uvicorn that drains: after the first signal, new requests get 503 while running answers finish.

    A second signal, or the end of the given seconds, ends running answers with an error.
    """

    def __init__(self, config: uvicorn.Config, server: Drainable, seconds: float) -> None:
        super().__init__(config)
        self._server, self._seconds, self._until = server, seconds, math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._server.draining:
            super().handle_exit(sig, frame)
        else:
            self._until = monotonic() + self._seconds
            self._server.draining = True

    async def on_tick(self, counter: int) -> bool:
        left = self._until - monotonic()
        if self._server.draining and (self._server.active == 0 or left <= 0 or self.should_exit):
            self._server.end_answers()
            seconds = 1 if self.should_exit else max(1, math.ceil(left))
            self.config.timeout_graceful_shutdown = seconds  # for clients to receive the rest
            return True
        return await super().on_tick(counter)


class LoopErrors:
    """Logs asyncio's errors that no one awaits; connections that cannot be accepted are one line in ten seconds."""

    def __init__(self) -> None:
        self._warned = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _FULL and "socket" in context):
            return loop.default_exception_handler(context)
        if monotonic() - self._warned >= _WARN_SECONDS:
            self._warned = monotonic()
            _log.warning("new connections wait (%s): raise the limit of open files, ulimit -n", error.strerror)
        return None
