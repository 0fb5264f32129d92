"""How a server begins and ends: it listens before it is announced, and lets running answers finish."""

from __future__ import annotations

import math
import socket
from time import monotonic
from types import FrameType
from typing import Protocol

import uvicorn


def listening(config: uvicorn.Config) -> socket.socket:
    """A socket that already takes connections. Small packets, such as a token, are sent at once.

    asyncio would see to the latter, but not for a socket that uvicorn has bound. Connections inherit it.
    """
    listener = config.bind_socket()
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.listen(config.backlog)
    return listener


class Drained(Protocol):
    """Who answers requests."""

    active: int  # requests that are not finished
    draining: bool  # no more are taken


class DrainingServer(uvicorn.Server):
    """uvicorn, which goes on to answer while running answers finish: with 503, so that others are asked instead.

    The first signal begins this; a second one ends it at once.
    """

    def __init__(self, config: uvicorn.Config, server: Drained, seconds: float) -> None:
        super().__init__(config)
        self._server, self._seconds, self._until = server, seconds, math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._server.draining:
            super().handle_exit(sig, frame)
        else:
            self._until = monotonic() + self._seconds
            self._server.draining = True

    async def on_tick(self, counter: int) -> bool:
        left = self._until - monotonic()
        if self._server.draining and (self._server.active == 0 or left <= 0):
            self.config.timeout_graceful_shutdown = max(1, math.ceil(left))  # for clients to receive the rest
            return True
        return await super().on_tick(counter)
