"""Start a server from what the command line says: in this process, in those of torchrun, or on a Ray cluster."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from msrnn.cli.model_options import ModelOptions
from msrnn.cli.options import AUTO, SMALL
from msrnn.cli.past_training import engine_maker, engine_of
from msrnn.cli.processes import is_first, started_by_torchrun
from msrnn.cli.terminal import loading, note
from msrnn.core.atomic import make_private_folder
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.hf.rnn import MultiStateRNN
    from msrnn.server.limits import Limits
    from msrnn.server.router import Router
    from msrnn.server.server import Server

NONE = "none"  # of --generation-config: neutral sampling defaults


@dataclass(frozen=True)
class Setup:
    """What a server is made of; other processes can make it, too."""

    options: ModelOptions
    name: str | None
    rows: int | None
    sessions: Path | None
    session_bytes: int | None
    session_days: float | None
    prefix_states: Path | None
    prefix_disk_bytes: int
    prompt_tokens: int | None
    max_tokens: int
    max_total_tokens: int
    limits: Limits
    generation_config: str = AUTO
    allow_special_tokens: bool = False
    marker: Path | None = None  # a file in the folder of sessions, which all replicas must see
    auto: bool = False  # whether requests that may pass the training length have other positions

    def server(
        self, rnn: MultiStateRNN, tokenizer: Any, shared: bool = False, number: int = 0, count: int = 1
    ) -> Server:
        """Make the server from a loaded model, which other processes of the job may share.

        `number` is that of this replica, `count` how many there are.
        """
        from msrnn.server.affinity import assign_replica
        from msrnn.server.defaults import sampling_defaults
        from msrnn.server.protocol import Served
        from msrnn.server.server import Server

        defaults = sampling_defaults(rnn.model.generation_config) if self.generation_config == AUTO else {}

        prefixes = self.prefix_states
        if prefixes is not None and count > 1:
            prefixes = prefixes / f"replica-{number}"
        make = engine_maker(rnn, self.options, shared) if self.auto else engine_of(rnn, shared)
        engine = make(
            slots=self.rows,
            tokenizer=tokenizer,
            prompt_tokens=self.prompt_tokens,
            prefix_folder=prefixes,
            prefix_disk_bytes=self.prefix_disk_bytes // count,
            sessions=self.sessions,
            session_bytes=self.session_bytes and max(1, self.session_bytes // count),
            session_days=self.session_days,
            owns_session=lambda name: assign_replica(name, count) == number,
        )
        name = self.name or self.options.model or SMALL
        limits = (self.max_tokens, self.max_total_tokens)
        served = Served(name, tokenizer, *limits, engine.sessions, defaults, self.allow_special_tokens)
        return Server(engine, served, self.limits)

    def replica(self, count: int, number: int) -> Server:
        """The server of a replica, in a process of its own."""
        if self.marker is not None and not self.marker.exists():
            raise UsageError(
                f"--sessions {self.sessions}: not the same folder on every machine; name one that all share"
            )
        server = self.server(*self.options.load(), number=number, count=count)
        server.engine.warm_up()
        return server


def serve_here(setup: Setup, listen: Callable[[Server], None]) -> None:
    """In this process, or in those that torchrun has started."""
    rnn, tokenizer = setup.options.load()

    if not is_first():
        from msrnn.engine.rank import follow

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the first process ends, and then says so
        return follow(rnn)
    server = setup.server(rnn, tokenizer, shared=started_by_torchrun())
    facts, long = server.engine.executor.facts, server.engine.lanes[1:]
    more = "".join(f", and {lane.executor.facts.slots} past the training length" for lane in long)
    note(f"a conversation takes {facts.slot_nbytes:,} bytes, at any length; {facts.slots} are answered at once{more}")
    if setup.limits.keys and (without := len(server.engine.sessions.infos())):
        note(f"--sessions {setup.sessions}: {without} of them were made without a key, and no key can use them")
    if defaults := server.served.defaults:
        said = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        note(f"the model's own sampling defaults: {said}; --generation-config {NONE} ignores them")
    if rnn.device.type == "cuda":
        note("compiling and capturing what requests need")
    server.engine.warm_up()
    return listen(server)


def serve_replicas(setup: Setup, listen: Callable[[Router], None], count: int, ray: str, cpus: int | None) -> None:
    from msrnn.core.ray_cluster import Cluster, reachable
    from msrnn.server.ray_replicas import RayReplicas
    from msrnn.server.router import Router

    if started_by_torchrun():
        raise UsageError("--ray: a model that torchrun's processes share has one server; leave one of them out")
    options = setup.options
    cluster = Cluster(ray, options.device, cpus)
    note(cluster.summary())
    marker: Path | None = None
    if setup.sessions is None:
        note("without --sessions FOLDER, requests with a session_id are refused: they would end with their replica")
    else:
        make_private_folder(setup.sessions)
        marker = setup.sessions.resolve() / f".replicas-{uuid4().hex}"
        marker.touch()
    made = replace(
        setup,
        options=replace(options, device=cluster.device, model=reachable(options.model)),
        sessions=setup.sessions and setup.sessions.resolve(),
        prefix_states=setup.prefix_states and setup.prefix_states.resolve(),
        name=setup.name or options.model,
        limits=replace(setup.limits, keys=(), body_bytes=sys.maxsize, origins=None),  # the router checks them
        marker=marker,
    )
    try:
        with loading(f"{count} replicas"):
            started = RayReplicas(cluster, count, partial(made.replica, count))
        try:
            listen(Router(started.replicas, setup.limits, sessions=setup.sessions is not None))
        finally:
            started.close()
    finally:
        cluster.close()
        if marker is not None:
            marker.unlink(missing_ok=True)


def listen_until_stopped(
    server: Server | Router, listener: socket.socket | None, host: str, seconds: int, name: str, quiet: bool
) -> None:
    """Answer requests until a signal says otherwise."""
    import uvicorn

    from msrnn.server.http_server import DrainingServer, listen
    from msrnn.server.request_log import RequestLog

    assert listener is not None
    # Clients use idle connections again for longer than uvicorn's 5 seconds, and fail if they are closed just then.
    settings: Any = {"log_level": "warning", "access_log": False, "timeout_keep_alive": 75}
    app = server.app()
    config = uvicorn.Config(app if quiet else RequestLog(app, note), **settings)
    listen(listener, host)  # before it is announced
    address = f"http://{_address(host)}:{listener.getsockname()[1]}"
    note(f"{name} at {address}/v1; to chat in a browser, open {address}")
    # uvicorn raises the signal again when it has shut down, but a server that was told to end has not failed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    DrainingServer(config, server, seconds).run(sockets=[listener])


def _address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
