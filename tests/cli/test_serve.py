"""`msrnn serve` as a process of its own: it says what a conversation costs and where it listens, answers, and ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from command import Run

from msrnn.cli.serve import _is_local


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", 70000), "--port 70000: must be from 0 to 65535"),
        (("--queue", 0), "--queue 0: must be 1 or more"),
        (("--api-key", " "), "--api-key: must not be empty"),
        (("--policy", "tofu"), "tofu"),
        (("--policy", "full"), "fixed size in every layer"),
        (("--rows", -3), "--rows -3: must be a whole number, 1 or more"),
    ],
)
def test_bad_options(run: Run, options: tuple[object, ...], message: str) -> None:
    ran = run("serve", *options)
    assert ran.code == 2
    assert message in ran.err


def test_addresses_beyond_this_machine() -> None:
    assert [_is_local(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "example.org")] == [
        *[True] * 3,
        *[False] * 3,
    ]


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """A test that fails does not wait for its server."""
    try:
        yield
    finally:
        process.kill()


def test_a_server(folder: Path, tmp_path: Path) -> None:
    """Without a key on all addresses it warns; a finished turn of a session is a file; SIGTERM ends it with 0."""
    command = [sys.executable, "-c", "from msrnn.cli import main; main()", "serve", "--model", str(folder)]
    command += ["--size", "16", "--rows", "2", "--host", "0.0.0.0", "--port", "0", "--sessions", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, ending(server):
        assert server.stderr is not None
        said = ""
        for line in server.stderr:
            said += line
            if found := re.search(r"http://0\.0\.0\.0:(\d+)/v1", line):
                break
        assert found is not None, said
        assert re.search(r"a conversation takes [\d,]+ bytes, at any length; 2 are answered at once", said)
        assert "--api-key guards it" in said
        assert f"to chat in a browser, open http://0.0.0.0:{found[1]}\n" in said
        assert "<!doctype html>" in httpx.get(f"http://127.0.0.1:{found[1]}/", timeout=60).text
        address = f"http://127.0.0.1:{found[1]}/v1"
        body = {"prompt": "hello", "max_tokens": 3, "session_id": "talk"}
        answer = httpx.post(f"{address}/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] <= 3
        (session,) = httpx.get(f"{address}/sessions", timeout=60).json()["data"]
        assert session["tokens"] >= 5
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert "hello" not in said + server.stderr.read()
    assert (tmp_path / "talk.safetensors").exists()
