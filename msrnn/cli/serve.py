from __future__ import annotations

import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from typer import Option

from msrnn.cli.model_options import ModelOptions
from msrnn.cli.options import (
    AUTO,
    DEFAULT_POLICY,
    DEFAULT_SIZE,
    ORIGINAL,
    POSITIONS,
    SMALL,
    STATE_DTYPE,
    Backend,
    Cpus,
    Device,
    Dtype,
    Model,
    PolicyName,
    Ray,
    Size,
)
from msrnn.cli.past_training import engine_maker
from msrnn.cli.processes import is_first, started_by_torchrun
from msrnn.cli.serve_options import check, check_folders, check_origins, check_replicas, check_tokens, is_local
from msrnn.cli.terminal import loading, note
from msrnn.core.atomic import make_private_folder
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.engine.engine import Engine
    from msrnn.hf.rnn import MultiStateRNN
    from msrnn.serve.app import Server
    from msrnn.serve.front import Front
    from msrnn.serve.limits import Limits

KEY_VARIABLE = "MSRNN_API_KEY"
_PACKAGES = ("starlette", "uvicorn", "prometheus_client")  # those of the extra `serve`
NONE = "none"  # of --generation-config: neutral sampling defaults


@dataclass(frozen=True)
class ServeOptions:
    model: Model = None
    policy: PolicyName = DEFAULT_POLICY
    size: Size = DEFAULT_SIZE
    positions: Annotated[
        str,
        Option(
            help=f"{POSITIONS}; auto: original, and for requests that may pass the training length compressed, with "
            "the first token protected and a horizon of 4 times the size."
        ),
    ] = AUTO
    state_dtype: Annotated[str | None, Option(help=STATE_DTYPE, show_default="not quantized")] = None
    device: Device = "auto"
    dtype: Dtype = None
    backend: Backend = "auto"

    @property
    def auto(self) -> bool:
        return self.positions == AUTO

    def completed(self) -> ModelOptions:
        return ModelOptions(**{**vars(self), "positions": ORIGINAL if self.auto else self.positions})


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

    def server(self, rnn: MultiStateRNN, tokenizer: Any, kind: type[Engine], number: int = 0, count: int = 1) -> Server:
        """Make the server from a loaded model. `number` is that of this replica, `count` how many there are."""
        from msrnn.serve.affinity import owner
        from msrnn.serve.app import Server
        from msrnn.serve.defaults import sampling_defaults
        from msrnn.serve.protocol import Served

        defaults = sampling_defaults(rnn.model.generation_config) if self.generation_config == AUTO else {}

        prefixes = self.prefix_states
        if prefixes is not None and count > 1:
            prefixes = prefixes / f"replica-{number}"
        make = engine_maker(rnn, self.options, kind) if self.auto else partial(kind, rnn)
        engine = make(
            rows=self.rows,
            tokenizer=tokenizer,
            prompt_tokens=self.prompt_tokens,
            prefix_folder=prefixes,
            prefix_disk_bytes=self.prefix_disk_bytes // count,
            sessions=self.sessions,
            session_bytes=self.session_bytes and max(1, self.session_bytes // count),
            session_days=self.session_days,
            owns_session=lambda name: owner(name, count) == number,
        )
        name = self.name or self.options.model or SMALL
        limits = (self.max_tokens, self.max_total_tokens)
        served = Served(name, tokenizer, *limits, engine.sessions, defaults, self.allow_special_tokens)
        return Server(engine, served, self.limits)

    def replica(self, count: int, number: int) -> Server:
        """The server of a replica, in a process of its own."""
        from msrnn.engine.engine import Engine

        if self.marker is not None and not self.marker.exists():
            raise UsageError(
                f"--sessions {self.sessions}: not the same folder on every machine; name one that all share"
            )
        server = self.server(*self.options.load(), Engine, number, count)
        server.engine.warm_up()
        return server


def serve(
    *,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is every address of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    rows: Annotated[int | None, Option(help="Answers at once.", show_default="as many as fit, 8 on cpu")] = None,
    name: Annotated[str | None, Option(help="Name of the model in the API.", show_default="the model's")] = None,
    api_key: Annotated[
        list[str] | None,
        Option(help="A key that requests to /v1 must have; repeat for more.", show_default=f"${KEY_VARIABLE}, or none"),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        Option(
            help="Without a key: a name by which the server may be asked, too; repeat for more.", show_default="none"
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        Option(
            help="Origin of web pages that may use the server, as http://localhost:3000; repeat for more.",
            show_default="none",
        ),
    ] = None,
    sessions: Annotated[
        Path | None, Option(help="Folder where sessions are kept over restarts.", show_default="memory only")
    ] = None,
    session_bytes: Annotated[
        int | None,
        Option(
            help="Most bytes of all sessions; the least recently used one is deleted first.",
            show_default="1 GiB in memory, 64 GiB in a folder",
        ),
    ] = None,
    session_days: Annotated[
        float | None, Option(help="Delete sessions without a turn for this many days.", show_default="never")
    ] = None,
    prefix_states: Annotated[
        Path | None, Option(help="Folder for kept states of prompts that no longer fit in memory.", show_default="none")
    ] = None,
    prefix_disk_bytes: Annotated[int, Option(help="Most bytes of kept states in that folder.")] = 2**34,
    prompt_tokens: Annotated[
        int | None,
        Option(help="Tokens of new prompts that are read between two decode steps.", show_default="512; 2048 on a GPU"),
    ] = None,
    max_tokens: Annotated[int, Option(help="Tokens of an answer for which a request gives no limit.")] = 512,
    max_total_tokens: Annotated[int, Option(help="Most tokens of a prompt and its answer together.")] = 1_000_000,
    generation_config: Annotated[
        str,
        Option(help=f"Sampling defaults: {AUTO}, those of the model's generation_config.json; {NONE}, temperature 1."),
    ] = AUTO,
    allow_special_tokens: Annotated[
        bool, Option("--allow-special-tokens", help="Let special tokens in the text of messages be special.")
    ] = False,
    queue: Annotated[int, Option(help="Prompts that may wait; more are answered with 429.")] = 256,
    max_body_bytes: Annotated[int, Option(help="Most bytes of a request.")] = 8 * 2**20,
    shutdown_timeout: Annotated[int, Option(help="Seconds that running answers have after Ctrl-C or SIGTERM.")] = 30,
    quiet: Annotated[bool, Option("--quiet", help="Do not print a line for each request.")] = False,
    replicas: Annotated[int | None, Option(help="With --ray: servers behind this address.", show_default="1")] = None,
    ray: Ray = None,
    cpus: Cpus = None,
    given: ServeOptions,
) -> None:
    """Serve a model over HTTP, with the API of OpenAI. Every conversation has the same size, so memory cannot run out.

    The page at / is a chat in the browser that shows what the model still remembers. /v1/chat/completions,
    /v1/completions and /v1/models are those that OpenAI's clients use; /v1/sessions, /health, /metrics and /version
    come with them. With "session_id" in a request, its messages are only what is new, and the
    server remembers the conversation. Each request is one line on standard error,
    without texts and keys. To ask it from a shell:
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 32}'

    Examples:
        msrnn serve
        msrnn serve --model my-model --size 1024 --rows 64
        msrnn serve --sessions sessions/ --session-days 30 --prefix-states prefixes/
        msrnn serve --host 0.0.0.0 --port 80 --api-key secret
        msrnn serve --replicas 4 --ray --sessions sessions/
        torchrun --no-python --nproc-per-node 8 msrnn serve --model a-large-model
    """
    options = given.completed()
    keys = api_key or [key for key in [os.environ.get(KEY_VARIABLE, "")] if key]
    counts = {
        "--rows": rows,
        "--prompt-tokens": prompt_tokens,
        "--max-tokens": max_tokens,
        "--max-total-tokens": max_total_tokens,
        "--queue": queue,
        "--max-body-bytes": max_body_bytes,
        "--prefix-disk-bytes": prefix_disk_bytes,
        "--session-bytes": session_bytes,
    }
    if session_days is not None and not 0 < session_days < math.inf:
        raise UsageError(f"--session-days {session_days}: must be above 0; leave it out to delete none")
    check(port, counts, shutdown_timeout, name, keys)
    check_tokens(max_tokens, max_total_tokens)
    check_origins(cors_origin or (), keys)
    if generation_config not in (AUTO, NONE):
        raise UsageError(f"--generation-config {generation_config}: must be {AUTO} or {NONE}")
    check_folders(sessions, prefix_states)
    check_replicas(replicas, ray, cpus)
    if missing := [package for package in _PACKAGES if find_spec(package) is None]:
        raise UsageError(f"the package {missing[0]} is not installed: pip install 'msrnn[serve]'")
    from msrnn.serve.http_server import bind
    from msrnn.serve.limits import Limits
    from msrnn.serve.origins import Origins

    listener = bind(host, port) if is_first() else None  # before a model is loaded, which takes long
    bound = (host,) if listener is None else (host, listener.getsockname()[0])
    setup = Setup(
        options,
        name,
        rows,
        sessions,
        session_bytes,
        session_days,
        prefix_states,
        prefix_disk_bytes,
        prompt_tokens,
        max_tokens,
        max_total_tokens,
        Limits(queue, max_body_bytes, keys=keys, origins=Origins(bound, allowed_host or (), cors_origin or ())),
        generation_config,
        allow_special_tokens,
        auto=given.auto,
    )
    if not keys and not is_local(host):
        note(f"--host {host}: anyone who can reach this machine can use the model; --api-key guards it")
    shown = name or given.model or SMALL
    listen = partial(_listen, listener=listener, host=host, seconds=shutdown_timeout, name=shown, quiet=quiet)
    with listener or nullcontext():
        if ray is not None:
            return _serve_replicas(setup, listen, replicas or 1, ray, cpus)
        return _serve_here(setup, listen)


def _serve_here(setup: Setup, listen: Callable[[Server], None]) -> None:
    """In this process, or in those that torchrun has started."""
    rnn, tokenizer = setup.options.load()
    from msrnn.distributed.leading import LeadingEngine, follow
    from msrnn.engine.engine import Engine

    if not is_first():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the first process ends, and then says so
        return follow(rnn)
    server = setup.server(rnn, tokenizer, LeadingEngine if started_by_torchrun() else Engine)
    rows = server.engine.rows
    one = rows.nbytes // rows.capacity
    long = server.engine.lanes[1:]
    more = "".join(f", and {lane.rows.capacity} past the training length" for lane in long)
    note(f"a conversation takes {one:,} bytes, at any length; {rows.capacity} are answered at once{more}")
    if setup.limits.keys and (without := len(server.engine.sessions.infos())):
        note(f"--sessions {setup.sessions}: {without} of them were made without a key, and no key can use them")
    if defaults := server.served.defaults:
        said = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        note(f"the model's own sampling defaults: {said}; --generation-config {NONE} ignores them")
    if rnn.device.type == "cuda":
        note("compiling and capturing what requests need")
    server.engine.warm_up()
    return listen(server)


def _serve_replicas(setup: Setup, listen: Callable[[Front], None], count: int, ray: str, cpus: int | None) -> None:
    from msrnn.distributed.ray_cluster import Cluster, reachable
    from msrnn.distributed.ray_replicas import RayReplicas
    from msrnn.serve.front import Front

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
        limits=replace(setup.limits, keys=(), body_bytes=sys.maxsize, origins=None),  # the front checks them
        marker=marker,
    )
    try:
        with loading(f"{count} replicas"):
            started = RayReplicas(cluster, count, partial(made.replica, count))
        try:
            listen(Front(started.replicas, setup.limits, sessions=setup.sessions is not None))
        finally:
            started.close()
    finally:
        cluster.close()
        if marker is not None:
            marker.unlink(missing_ok=True)


def _listen(
    server: Server | Front, listener: socket.socket | None, host: str, seconds: int, name: str, quiet: bool
) -> None:
    """Answer requests until a signal says otherwise."""
    import uvicorn

    from msrnn.serve.http_server import DrainingServer, listen
    from msrnn.serve.request_log import RequestLog

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
