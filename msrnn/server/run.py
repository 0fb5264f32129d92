"""Run a server until it is stopped: in this process, in those of torchrun, or as replicas on a Ray cluster."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import uvicorn

from msrnn.core.atomic import make_private_folder
from msrnn.core.notes import loading, note, showing
from msrnn.core.ray_cluster import Cluster, reachable
from msrnn.core.torchrun import is_torchrun
from msrnn.server.factory import make_replica, make_server
from msrnn.server.http_server import DrainingServer, listen
from msrnn.server.limits import Limits
from msrnn.server.ray_replicas import RayReplicas
from msrnn.server.request_log import RequestLog
from msrnn.server.router import Router
from msrnn.server.server import Server
from msrnn.server.setup import Address, Setup

if TYPE_CHECKING:
    from msrnn.engine.engine import Engine
    from msrnn.hf.rnn import MultiStateRNN

# Clients use idle connections again for longer than uvicorn's 5 seconds, and fail if they are closed just then.
_UVICORN: Any = {"log_level": "warning", "access_log": False, "timeout_keep_alive": 75}


class Bound(NamedTuple):
    """A server's address, bound to a socket that does not listen yet, and the limits of its requests."""

    address: Address
    listener: socket.socket
    limits: Limits


def run_server(setup: Setup, rnn: MultiStateRNN, tokenizer: Any, bound: Bound) -> None:
    """Serve from this process; others that torchrun has started follow it."""
    server = make_server(setup, bound.limits, rnn, tokenizer, shared=is_torchrun())
    facts, long = server.engine.executor.facts, server.engine.lanes[1:]
    more = "".join(f", and {lane.executor.facts.slots} past the training length" for lane in long)
    archive = f", and {facts.archived_row_nbytes:,} for each token in its archive" if facts.recall else ""
    if facts.index_row_nbytes:
        archive += f" and {facts.index_row_nbytes:,} on the device to search it"
    if facts.archived_tokens is not None:
        archive += f", which has the last {facts.archived_tokens:,} at most"
    held = f"{facts.slot_nbytes:,} bytes, at any length{archive}"
    note(f"a conversation takes {held}; {facts.slots} are answered at once{more}")
    if setup.api_key and (without := len(server.engine.sessions.infos())):
        note(f"sessions {setup.sessions}: {without} of them were made without a key, and no key can use them")
    if defaults := server.served.defaults:
        stated = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        note(f"the model's own sampling defaults: {stated}; generation_config=none ignores them")
    warm_up(server.engine, captures=rnn.captures)
    _listen_until_stopped(server, setup.served_model_name, bound)


def warm_up(engine: Engine, captures: bool) -> None:
    """Let the first requests wait for nothing that can be prepared, and say so where it takes long."""
    began = time.perf_counter()
    if captures:
        note("compiling and capturing what requests need")
    with showing() as show:
        engine.warm_up(show)
    if captures:
        note(f"compiled and captured in {time.perf_counter() - began:.0f} s")


def follow_server(rnn: MultiStateRNN) -> None:
    """Compute with the first process that torchrun has started, until that one ends."""
    from msrnn.engine.rank import follow

    with _ignoring_signals():  # the first process ends, and then says so
        follow(rnn)


def run_replicas(setup: Setup, count: int, ray: str, cpus: int | None, bound: Bound) -> None:
    """Start replicas on a Ray cluster, and route requests to them from this process."""
    options = setup.model
    assert options is not None
    cluster = Cluster(ray, options.device, cpus)
    note(cluster.summary())
    marker: Path | None = None
    if setup.sessions is None:
        note("without a folder for sessions, requests with a session_id are refused: they would end with their replica")
    else:
        make_private_folder(setup.sessions)
        marker = setup.sessions.resolve() / f".replicas-{uuid4().hex}"
        marker.touch()
    replica_setup = replace(
        setup,
        model=replace(options, device=cluster.device, model=reachable(options.model)),
        sessions=setup.sessions and setup.sessions.resolve(),
        prefix_states=setup.prefix_states and setup.prefix_states.resolve(),
    )
    unchecked = replace(bound.limits, keys=(), body_bytes=sys.maxsize, origins=None)  # the router checks them
    try:
        with loading(f"{count} replicas"):
            started = RayReplicas(cluster, count, partial(make_replica, replica_setup, unchecked, marker, count))
        try:
            router = Router(started.replicas, bound.limits, sessions=setup.sessions is not None)
            _listen_until_stopped(router, setup.served_model_name, bound)
        finally:
            started.close()
    finally:
        cluster.close()
        if marker is not None:
            marker.unlink(missing_ok=True)


def _listen_until_stopped(server: Server | Router, name: str, bound: Bound) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    address, listener, _ = bound
    app = server.app()
    files: Any = {"ssl_certfile": address.ssl_certfile, "ssl_keyfile": address.ssl_keyfile}
    config = uvicorn.Config(app if address.quiet else RequestLog(app, note), **files, **_UVICORN)
    listen(listener, address.host)  # before it is announced
    host = f"[{address.host}]" if ":" in address.host else address.host
    scheme = "http" if address.ssl_certfile is None else "https"
    url = f"{scheme}://{host}:{listener.getsockname()[1]}"
    note(f"{name} at {url}/v1; to chat in a browser, open {url}")
    # uvicorn raises the signal again when it has shut down, but a server that is stopped has not failed.
    with _ignoring_signals():
        DrainingServer(config, server, address.shutdown_timeout).run(sockets=[listener])


@contextmanager
def _ignoring_signals() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM where nothing else handles them. Only the main thread can have handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
