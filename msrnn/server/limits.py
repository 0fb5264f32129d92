"""Limits of a server, and the body of a request within them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from msrnn.server.errors import ApiError, queue_full_error
from msrnn.server.origins import LOOPBACK, Origins, check_content_type

RETRY_SECONDS = 1
SMALL_BODY = 2**16  # bytes that take little time to check
LARGE_AT_ONCE = 1
PARSED_BYTES = 2**25  # of large bodies that are checked or wait for it; one alone may be larger
Checked = TypeVar("Checked")


@dataclass(frozen=True)
class Limits:
    queue: int = 256  # prompts that wait for a batch slot; more are refused with 429
    body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0  # for a client to send its request
    keys: Sequence[str] = ()
    behind: int = 4096  # events that a client may be behind its stream; then it is cancelled
    origins: Origins | None = LOOPBACK  # who may ask from a browser; None: another process has checked it


class Parsing:
    """Requests that are being checked and tokenized, in other threads.

    A text takes seconds to tokenize, and a hundred times its bytes, so large requests wait for each other, and a small
    one never waits for a large one. What waits is bounded in number and in bytes; more is answered with 429.
    """

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def run(self, body: bytes, check: Callable[[Any], Checked], room: int) -> Checked:
        """Check the JSON of a body; `room` are the requests that may be checked at once."""
        size = len(body) if len(body) > SMALL_BODY else 0  # small ones are bounded by their number
        if self.count >= room or (size and self.bytes and self.bytes + size > PARSED_BYTES):
            raise queue_full_error(RETRY_SECONDS)
        self.count, self.bytes = self.count + 1, self.bytes + size
        try:
            async with self._large if size else nullcontext():
                return await asyncio.to_thread(lambda: check(parse_json(body)))
        finally:
            self.count, self.bytes = self.count - 1, self.bytes - size


async def read_body(http: Request, limits: Limits) -> bytes:
    if http.method == "POST":
        check_content_type(http.headers)
    most = limits.body_bytes
    too_large = ApiError(413, f"the body is larger than {most:,} bytes", code="body_too_large")
    length = http.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in http.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="body_too_slow") from None
    return bytes(body)


def parse_json(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def parse_small_json(body: bytes) -> Any:
    """The JSON of a small body, parsed in this thread."""
    if len(body) > SMALL_BODY:
        raise ApiError(413, f"the body is larger than {SMALL_BODY:,} bytes", code="body_too_large")
    return parse_json(body)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
