"""A server as a process of its own, and streaming clients over raw connections, for load tests and benchmarks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

CHUNK = b"data: "
# glibc then gives free memory back, so that resident memory is memory in use; otherwise it grows and shrinks by 80 MB.
GIVE_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}


class Reply(NamedTuple):
    text: str
    finish_reason: str | None  # None: the client has left, or the stream broke off
    first_seconds: float  # to the first text
    usage: dict[str, Any]


async def ask(
    address: str, body: dict[str, Any], leave_after: int | None = None, path: str = "/v1/completions", key: str = ""
) -> Reply:
    """Stream one answer over a raw connection; the client disconnects after `leave_after` chunks."""
    host, _, port = address.removeprefix("http://").partition(":")
    sent = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(sent)}\r\n\r\n"
    began, chunks, text, first = time.perf_counter(), 0, "", 0.0
    reason: str | None = None
    usage: dict[str, Any] = {}
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    try:
        writer.write(head.encode() + sent)
        await writer.drain()
        if leave_after == 0:
            return Reply("", None, 0.0, {})
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r}: {await reader.read()!r}")
        async for line in reader:  # HTTP/1.0: the body has no frames, and ends with the connection
            if not line.startswith(CHUNK) or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[len(CHUNK) :])
            for choice in chunk["choices"]:
                new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                first = first or (time.perf_counter() - began if new else 0.0)
                text += new
                reason = choice["finish_reason"] or reason
            usage = chunk.get("usage") or usage
            chunks += 1
            if chunks == leave_after:
                return Reply(text, None, first, {})
        return Reply(text, reason, first, usage)
    finally:
        writer.transport.abort() if leave_after is not None else writer.close()


async def ask_at_once(
    address: str, bodies: Sequence[dict[str, Any]], leave_after: Sequence[int | None], key: str = ""
) -> list[Reply]:
    """One client for each body, all at the same time."""
    pairs = zip(bodies, leave_after, strict=True)
    return await asyncio.gather(*(ask(address, body, leave, key=key) for body, leave in pairs))


def leaving(clients: int, most_chunks: int, seed: int) -> list[int | None]:
    """When each client leaves; one in five does."""
    draw = random.Random(seed)
    gone = set(draw.sample(range(clients), clients // 5))
    return [draw.randint(0, most_chunks) if i in gone else None for i in range(clients)]


@contextmanager
def serving(*options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`msrnn serve` with these options, as a process of its own, and its address; killed at the end."""
    program = [sys.executable, "-c", "from msrnn.cli import main; main()"]
    command = [*program, "serve", "--port", "0", "--quiet", *map(str, options)]  # no one reads the lines of requests
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **GIVE_BACK})
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/v1", line):
                yield process, found[1]
                return
        raise RuntimeError(f"the server did not start: {said}")
    finally:
        process.kill()
        process.wait()


def usage_of(process: int) -> dict[str, float]:
    """Resident memory and open files of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return {"rss_mb": int(found[1]) / 1000, "files": len(os.listdir(f"/proc/{process}/fd"))}


def metrics(address: str) -> dict[str, float]:
    """What `/metrics` says, without labels."""
    import httpx

    text = httpx.get(f"{address}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^msrnn_(\w+) (\S+)$", text, flags=re.MULTILINE)}


def settled(address: str) -> dict[str, float]:
    """Metrics once nothing runs and nothing waits; waits for it."""
    for _ in range(600):
        found = metrics(address)
        if found["num_requests_running"] == found["num_requests_waiting"] == 0:
            return found
        time.sleep(0.05)
    raise RuntimeError(f"requests are left: {found}")
