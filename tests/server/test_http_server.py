"""Sockets: an address that is bound before it takes connections, and what happens without file descriptors."""

from __future__ import annotations

import errno
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from msrnn.errors import UsageError
from msrnn.server.http_server import _address_error, bind, listen


def test_a_socket_takes_connections_when_told_and_does_not_collect_small_packets() -> None:
    """Or a client waits 40 ms for each reply on a connection that it has used before, and for tokens of a stream."""
    with bind("127.0.0.1", 0) as listener:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname())
        listen(listener, "127.0.0.1")
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_addresses_that_cannot_be_used() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        port = first.getsockname()[1]
        listen(first, "127.0.0.1")
        in_use = rf"port={port}: in use by another program on 127.0.0.1; choose another, or 0 for a free one"
        with pytest.raises(UsageError, match=in_use):
            listen(second, "127.0.0.1")
        with pytest.raises(UsageError, match=in_use):
            bind("127.0.0.1", port)
    with pytest.raises(UsageError, match=r"host='192.0.2.1': not an address of this machine; 0.0.0.0 is every"):
        bind("192.0.2.1", 0)
    for host in ("not an address", "a..b", ""):
        with pytest.raises(UsageError, match=rf"host={host!r}: unknown \(.*\); give an address of this machine"):
            bind(host, 0)
    denied = _address_error(PermissionError(errno.EACCES, "Permission denied"), "127.0.0.1", 80)
    assert str(denied) == "port=80: this user may not listen on it; choose one from 1024 to 65535"


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process can be set on Linux only")
@pytest.mark.slow
def test_without_file_descriptors(model: Path, tmp_path: Path) -> None:
    """Connections wait, which is said once and not thousands of times, and are answered when others have ended."""
    command = [sys.executable, "-c", "from msrnn.cli import main; main()", "serve", "--model", str(model)]
    command += ["--size", "16", "--slots", "2", "--port", "0", "--device", "cpu", "--quiet"]
    log = tmp_path / "log"
    with log.open("w") as written, subprocess.Popen(command, stderr=written) as server, ExitStack() as at_end:
        at_end.callback(server.kill)
        while not (found := re.search(r"http://(127.0.0.1):(\d+)/v1", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        host, port = found.groups()
        health = f"http://{host}:{port}/health"
        assert httpx.get(health, timeout=60).status_code == 200
        most = len([*Path(f"/proc/{server.pid}/fd").iterdir()]) + 5
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (most, most))
        with ExitStack() as idle:
            for _ in range(20):
                idle.enter_context(socket.create_connection((host, int(port))))
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(health, timeout=2.5)  # asyncio tries again every second
        assert httpx.get(health, timeout=60).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    said = log.read_text()
    assert "new connections wait (Too many open files): raise the limit of open files, ulimit -n\n" in said
    assert said.count("\n") < 10  # a line in ten seconds, after those of the start; none for requests
    assert "GET" not in said
