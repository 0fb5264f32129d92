from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.model_options import ModelOptions
from msrnn.cli.options import (
    AUTO,
    DEFAULT_POLICY,
    DEFAULT_SIZE,
    EXTENDED,
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
    as_typed,
)
from msrnn.cli.processes import is_first
from msrnn.cli.serve_options import (
    check,
    check_folders,
    check_origins,
    check_replicas,
    check_tokens,
    is_local,
    remarks_on_folders,
)
from msrnn.cli.serving import NONE, Setup, listen_until_stopped, serve_here, serve_replicas
from msrnn.cli.terminal import note
from msrnn.errors import UsageError
from msrnn.size import resolve

KEY_VARIABLE = "MSRNN_API_KEY"
_PACKAGES = ("starlette", "uvicorn", "prometheus_client")  # those of the extra `serve`


@dataclass(frozen=True)
class ServeOptions:
    model: Model = None
    policy: PolicyName = DEFAULT_POLICY
    size: Size = DEFAULT_SIZE
    positions: Annotated[
        str,
        Option(help=f"{POSITIONS}; auto: original, and for requests that may pass the training length {EXTENDED}."),
    ] = AUTO
    state_dtype: Annotated[str | None, Option(help=STATE_DTYPE, show_default="not quantized")] = None
    device: Device = "auto"
    dtype: Dtype = None
    backend: Backend = "auto"

    @property
    def auto(self) -> bool:
        return self.positions == AUTO

    def completed(self) -> ModelOptions:
        policy, size = resolve(self.policy, self.size)
        positions = ORIGINAL if self.auto else self.positions
        return ModelOptions(**{**vars(self), "policy": policy, "size": size, "positions": positions})


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
        Path | None, Option(help="Folder for cached prefixes that no longer fit in memory.", show_default="none")
    ] = None,
    prefix_disk_bytes: Annotated[int, Option(help="Most bytes of cached prefixes in that folder.")] = 2**34,
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
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}'

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
        raise UsageError(f"--session-days {as_typed(session_days)}: must be above 0; leave it out to delete none")
    check(port, counts, shutdown_timeout, name, keys)
    check_tokens(max_tokens, max_total_tokens)
    check_origins(cors_origin or (), keys)
    if generation_config not in (AUTO, NONE):
        raise UsageError(f"--generation-config {generation_config}: must be {AUTO} or {NONE}")
    check_folders(sessions, prefix_states)
    check_replicas(replicas, ray, cpus)
    if missing := [package for package in _PACKAGES if find_spec(package) is None]:
        raise UsageError(f"the package {missing[0]} is not installed: pip install 'msrnn[serve]'")
    from msrnn.server.http_server import bind
    from msrnn.server.limits import Limits
    from msrnn.server.origins import Origins

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
    if is_first():
        for remark in remarks_on_folders({"--sessions": sessions, "--prefix-states": prefix_states}):
            note(remark)
    shown = name or given.model or SMALL
    listen = partial(
        listen_until_stopped, listener=listener, host=host, seconds=shutdown_timeout, name=shown, quiet=quiet
    )
    with listener or nullcontext():
        if ray is not None:
            return serve_replicas(setup, listen, replicas or 1, ray, cpus)
        return serve_here(setup, listen)
