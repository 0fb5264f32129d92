from __future__ import annotations

import ipaddress
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.model_options import ModelOptions
from msrnn.cli.options import (
    DEFAULT_POLICY,
    DEFAULT_SIZE,
    ORIGINAL,
    POSITIONS,
    SMALL,
    STATE_DTYPE,
    Backend,
    Device,
    Dtype,
    Model,
    PolicyName,
    Size,
)
from msrnn.cli.terminal import note, started_by_torchrun
from msrnn.errors import UsageError

KEY_VARIABLE = "MSRNN_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    model: Model = None
    policy: PolicyName = DEFAULT_POLICY
    size: Size = DEFAULT_SIZE
    positions: Annotated[str, Option(help=f"{POSITIONS}.")] = ORIGINAL
    state_dtype: Annotated[str | None, Option(help=STATE_DTYPE, show_default="not quantized")] = None
    device: Device = "auto"
    dtype: Dtype = None
    backend: Backend = "auto"

    def completed(self) -> ModelOptions:
        return ModelOptions(**vars(self))


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
    sessions: Annotated[
        Path | None, Option(help="Folder where sessions are kept over restarts.", show_default="memory only")
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
    queue: Annotated[int, Option(help="Prompts that may wait; more are answered with 429.")] = 256,
    max_body_bytes: Annotated[int, Option(help="Most bytes of a request.")] = 8 * 2**20,
    shutdown_timeout: Annotated[int, Option(help="Seconds that running answers have after Ctrl-C or SIGTERM.")] = 30,
    given: ServeOptions,
) -> None:
    """Serve a model over HTTP, with the API of OpenAI. Every conversation has the same size, so memory cannot run out.

    The page at / is a chat in the browser that shows what the model still remembers. /v1/chat/completions,
    /v1/completions and /v1/models are those that OpenAI's clients use; /v1/sessions, /health, /metrics and /version
    come with them. With "session_id" in a request, its messages are only what is new, and the
    server remembers the conversation. Prompts and keys are never logged. To ask it from a shell:
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 32}'

    Examples:
        msrnn serve
        msrnn serve --model my-model --size 1024 --rows 64
        msrnn serve --sessions sessions/ --prefix-states prefixes/
        msrnn serve --host 0.0.0.0 --port 80 --api-key secret
        torchrun --no-python --nproc-per-node 8 msrnn serve --model a-large-model
    """
    options = given.completed()
    keys = api_key or [key for key in [os.environ.get(KEY_VARIABLE, "")] if key]
    counts = {"--queue": queue, "--max-tokens": max_tokens, "--max-body-bytes": max_body_bytes}
    _check(port, {**counts, "--prefix-disk-bytes": prefix_disk_bytes}, keys)
    _check_folders(sessions, prefix_states)
    try:
        import uvicorn

        from msrnn.serve.app import Limits, Server
        from msrnn.serve.http_server import DrainingServer, listening
        from msrnn.serve.protocol import Served
    except ImportError as error:
        raise UsageError(f"the package {error.name} is not installed: pip install 'msrnn[serve]'") from error
    shared = started_by_torchrun()
    rnn, tokenizer = options.load(shared)
    from msrnn.distributed.leading import LeadingEngine, follow
    from msrnn.engine.engine import Engine

    if shared and int(os.environ["RANK"]) > 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the first process ends, and then says so
        return follow(rnn)
    engine = (LeadingEngine if shared else Engine)(
        rnn,
        rows,
        tokenizer=tokenizer,
        prompt_tokens=prompt_tokens,
        prefix_folder=prefix_states,
        prefix_disk_bytes=prefix_disk_bytes,
        sessions=sessions,
    )
    one = engine.rows.nbytes // engine.rows.capacity

    served = Served(name or given.model or SMALL, tokenizer, max_tokens, max_total_tokens, engine.sessions)
    server = Server(engine, served, Limits(queue, max_body_bytes, keys=keys))
    config = uvicorn.Config(server.app(), host, port, log_level="warning", access_log=False)
    note(f"a conversation takes {one:,} bytes, at any length; {engine.rows.capacity} are answered at once")
    if not keys and not _is_local(host):
        note(f"--host {host}: anyone who can reach this machine can use the model; --api-key guards it")
    if rnn.device.type == "cuda":
        note("compiling and capturing what requests need")
    engine.warm_up()
    listener = listening(config)  # before it is announced
    address = f"http://{_address(host)}:{listener.getsockname()[1]}"
    note(f"{served.name} at {address}/v1; to chat in a browser, open {address}")
    # uvicorn raises the signal again when it has shut down, but a server that was told to end has not failed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    DrainingServer(config, server, shutdown_timeout).run(sockets=[listener])
    return None


def _check(port: int, counts: dict[str, int], keys: list[str]) -> None:
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: must be from 0 to 65535")
    for option, count in counts.items():
        if count < 1:
            raise UsageError(f"{option} {count}: must be 1 or more")
    if not all(key.strip() and key.isascii() for key in keys):
        raise UsageError("--api-key: must not be empty, and must be plain ASCII")


def _check_folders(sessions: Path | None, prefix_states: Path | None) -> None:
    if sessions is not None and prefix_states is not None and sessions.resolve() == prefix_states.resolve():
        raise UsageError(f"--prefix-states {prefix_states}: is the folder of --sessions; name another one")


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
