"""What a client may ask for, and the body of its request within these limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from msrnn.serve.errors import ApiError


@dataclass(frozen=True)
class Limits:
    queue: int = 256  # prompts that wait for a row; more are answered with 429
    body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0  # for a client to send its request
    keys: Sequence[str] = ()
    behind: int = 4096  # events that a client may be behind its stream; then it is cancelled


async def read_body(http: Request, limits: Limits) -> bytes:
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


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
