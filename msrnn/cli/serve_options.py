"""The options of `msrnn serve`, named like the arguments of `msrnn.serve`, which checks them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.options import (
    EXTENDED,
    POSITIONS,
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
from msrnn.cli.recall_options import Archive, ArchiveBytes, RecallEvery, RecallRows, RecallWhileReading, Search
from msrnn.hf.model_options import AUTO, DEFAULT_POLICY, DEFAULT_SIZE
from msrnn.recall import HOST
from msrnn.server.call_formats import FORMATS

KEY_VARIABLE = "MSRNN_API_KEY"


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
    recall: RecallRows = 0
    recall_every: RecallEvery = 1
    recall_while_reading: RecallWhileReading = None
    archive: Archive = HOST
    archive_bytes: ArchiveBytes = None
    search: Search = AUTO
    device: Device = "auto"
    dtype: Dtype = None
    backend: Backend = "auto"
    compile: Annotated[
        bool,
        Option("--compile", help="On a GPU: torch.compile the model, once at the start, for faster decode steps."),
    ] = False
    revision: Annotated[
        str | None, Option(help="Branch, tag or commit of a model on the hub.", show_default="its main branch")
    ] = None
    trust_remote_code: Annotated[
        bool,
        Option("--trust-remote-code", help="Run the code of a model whose family transformers does not have."),
    ] = False
    lora: Annotated[
        Path | None,
        Option(help="Folder of a LoRA adapter (PEFT), which is merged into the weights.", show_default="none"),
    ] = None
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is every address of this machine.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one.")] = 8000
    ssl_certfile: Annotated[
        Path | None, Option(help="For HTTPS: certificate, as a PEM file.", show_default="none: HTTP")
    ] = None
    ssl_keyfile: Annotated[
        Path | None, Option(help="Key of the certificate, as a PEM file.", show_default="in the same file")
    ] = None
    slots: Annotated[
        int | None,
        Option(
            help="Batch slots: answers that are generated at once; more requests wait.",
            show_default="as many as fit, 8 on cpu",
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        Option("--served-model-name", "--name", help="Name of the model in the API.", show_default="the model's"),
    ] = None
    api_key: Annotated[
        list[str] | None,
        Option(
            help="A key that requests must have, but to open paths as /health; repeat for more.",
            show_default=f"${KEY_VARIABLE}, or none",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        Option(help="Without a key: another host name that requests may use; repeat for more.", show_default="none"),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        Option(
            help="Origin of web pages that may use the server, as http://localhost:3000; repeat for more.",
            show_default="none",
        ),
    ] = None
    sessions: Annotated[
        Path | None, Option(help="Folder where sessions survive a restart.", show_default="memory only")
    ] = None
    session_bytes: Annotated[
        int | None,
        Option(
            help="Most bytes of all sessions; the least recently used one is deleted first.",
            show_default="1 GiB in memory, 64 GiB in a folder",
        ),
    ] = None
    session_days: Annotated[
        float | None, Option(help="Delete sessions without a turn for this many days.", show_default="never")
    ] = None
    prefix_states: Annotated[
        Path | None, Option(help="Folder for cached prefixes that no longer fit in memory.", show_default="none")
    ] = None
    prefix_disk_bytes: Annotated[int, Option(help="Most bytes of cached prefixes in that folder.")] = 2**34
    prompt_tokens: Annotated[
        int | None,
        Option(
            help="Chunked prefill: tokens of new prompts that are read between two decode steps.",
            show_default="512; 2048 on a GPU",
        ),
    ] = None
    guesses: Annotated[
        int,
        Option(
            help="Most tokens that are guessed at once from the text, while one answer alone is generated; wrong ones "
            "are taken back."
        ),
    ] = 0
    draft: Annotated[
        str | None,
        Option(
            help="Smaller model with the same tokenizer, which guesses where the text does not (with --guesses): a "
            "folder, a .gguf file or a name on the hub.",
            show_default="none",
        ),
    ] = None
    max_tokens: Annotated[int, Option(help="Most tokens of an answer, where a request gives no limit.")] = 512
    max_total_tokens: Annotated[int, Option(help="Most tokens of a prompt and its answer together.")] = 1_000_000
    generation_config: Annotated[
        str,
        Option(help=f"Sampling defaults: {AUTO}, those of the model's generation_config.json; none, temperature 1."),
    ] = AUTO
    chat_template: Annotated[
        Path | None, Option(help="File with a chat template, in Jinja.", show_default="the model's")
    ] = None
    tool_call_parser: Annotated[
        str,
        Option(
            help=f"Format in which the model calls tools: {AUTO}, that which its chat template writes, "
            f"{', '.join(FORMATS)}."
        ),
    ] = AUTO
    allow_special_tokens: Annotated[
        bool, Option("--allow-special-tokens", help="Let special tokens in the text of messages be special.")
    ] = False
    protect: Annotated[
        str,
        Option(help="Tokens that are not evicted, where a request does not say it: none, system or prompt."),
    ] = "none"
    queue: Annotated[int, Option(help="Requests that may wait; more are refused with status 429.")] = 256
    max_body_bytes: Annotated[int, Option(help="Most bytes of a request.")] = 8 * 2**20
    shutdown_timeout: Annotated[int, Option(help="Seconds that running answers have after Ctrl-C or SIGTERM.")] = 30
    quiet: Annotated[bool, Option("--quiet", help="Do not print a line for each request.")] = False
    replicas: Annotated[int | None, Option(help="With --ray: servers behind this address.", show_default="1")] = None
    ray: Ray = None
    cpus: Cpus = None
