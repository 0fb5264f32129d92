"""`msrnn.serve`: check the settings of a server, bind its address, load the model, and answer until it is stopped.

This module imports neither torch nor the packages of the extra `serve`: bad settings are refused before.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrnn.core.torchrun import is_first
from msrnn.errors import UsageError
from msrnn.hf.model_options import AUTO, DEFAULT_POLICY, DEFAULT_SIZE, ORIGINAL, SMALL, ModelOptions
from msrnn.policy import Policy
from msrnn.recall import HOST
from msrnn.server.checks import check_packages, check_replicas, read_chat_template
from msrnn.server.setup import Address, Setup
from msrnn.size import SizeLike, resolve

if TYPE_CHECKING:
    from msrnn.hf.rnn import MultiStateRNN

_UNSET = {"recall_every": 1, "archive": HOST}  # of options whose default has a value
Folder = str | os.PathLike[str] | None


def serve(
    model: str | os.PathLike[str] | MultiStateRNN | None = None,
    tokenizer: Any = None,
    *,
    policy: str | Policy | None = None,
    size: SizeLike = None,
    positions: str = AUTO,
    state_dtype: str | None = None,
    recall: int = 0,
    recall_every: int = 1,
    recall_while_reading: int | None = None,
    archive: str = HOST,
    archive_bytes: int | None = None,
    search: str = AUTO,
    device: str = "auto",
    dtype: str | None = None,
    backend: str = "auto",
    compile: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    lora: Folder = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    ssl_certfile: Folder = None,
    ssl_keyfile: Folder = None,
    slots: int | None = None,
    served_model_name: str | None = None,
    api_key: str | Sequence[str] | None = None,
    allowed_host: str | Sequence[str] | None = None,
    cors_origin: str | Sequence[str] | None = None,
    sessions: Folder = None,
    session_bytes: int | None = None,
    session_days: float | None = None,
    prefix_states: Folder = None,
    prefix_disk_bytes: int = 2**34,
    prompt_tokens: int | None = None,
    guesses: int = 0,
    draft: str | os.PathLike[str] | None = None,
    max_tokens: int = 512,
    max_total_tokens: int = 1_000_000,
    generation_config: str = AUTO,
    chat_template: Folder = None,
    tool_call_parser: str = AUTO,
    allow_special_tokens: bool = False,
    protect: str = "none",
    queue: int = 256,
    max_body_bytes: int = 8 * 2**20,
    shutdown_timeout: int = 30,
    quiet: bool = False,
    replicas: int | None = None,
    ray: str | None = None,
    cpus: int | None = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API. Returns after Ctrl-C or SIGTERM, when running answers have ended.

    The arguments are the options of `msrnn serve`.

    model              a folder, a .gguf file or a name on the hub, None: the small default model. Or a
                       `MultiStateRNN`, with its tokenizer and without the arguments from `policy` to `compile`
    policy, size       as in `MultiStateRNN`; by default "tova" and 512
    positions          as in `MultiStateRNN`; "auto": original, and for requests that may pass the training length
                       compressed, with a horizon and the first token protected
    recall             KV rows that come back from an archive of all tokens, as in `MultiStateRNN`, and `recall_every`
                       and `recall_while_reading`; 0: nothing is archived
    archive            where archives are: "host", "device", or a folder for memory-mapped files
    archive_bytes      most bytes of each archive, which then drops the oldest tokens; None: it has all
    search             how archives are searched: "exact", by their keys; "int8", by 8-bit copies of the keys on the
                       device; "auto": these where kernels search, on a GPU
    device, dtype      where to compute, and the dtype of the weights; by default CUDA if there is a device, and float32
                       on a CPU, else the checkpoint's own dtype
    state_dtype, backend, compile   as in `MultiStateRNN`
    revision           a branch, tag or commit of a model on the hub
    trust_remote_code  run the code of a model whose family transformers does not have
    lora               the folder of a LoRA adapter (PEFT), which is merged into the model's weights
    host, port         the address to listen on; port 0 takes a free one
    ssl_certfile       for HTTPS: a certificate in the PEM format, and its key in `ssl_keyfile` or in the same file
    slots              batch slots: answers that are generated at once; by default as many as fit, 8 on a CPU
    served_model_name  the name of the model in the API; by default its own
    api_key            a key that requests to /v1, /tokenize and /detokenize must have, or several
    allowed_host       without a key: names by which the server may be asked, too
    cors_origin        origins of web pages that may use the server, as "http://localhost:3000"
    sessions           a folder where sessions survive a restart; `session_bytes` and `session_days` limit them
    prefix_states      a folder for cached prefixes that no longer fit in memory, at most `prefix_disk_bytes`
    prompt_tokens      tokens of new prompts that are read between two decode steps (chunked prefill)
    guesses            the most tokens that are guessed at once from the text, while one answer alone is generated
    draft              a smaller model with the same tokenizer, which guesses where the text does not: a folder, a .gguf
                       file or a name on the hub; its state is bounded by "tova" at 512 rows
    max_tokens         tokens of an answer for which a request gives no limit
    max_total_tokens   most tokens of a prompt and its answer together
    generation_config  sampling defaults: "auto", those of the model's generation_config.json; "none", temperature 1
    chat_template      a file with another chat template than the model's
    tool_call_parser   the format in which the model calls tools: "hermes", "llama3_json" or "mistral"; "auto": that of
                       its chat template
    allow_special_tokens   let special tokens in the text of messages be special
    protect            what requests protect from eviction that do not say it: "none", "system" (the system message of a
                       chat) or "prompt" (the whole prompt, until the session's next turn)
    queue              requests that may wait; more are refused with 429
    max_body_bytes     most bytes of a request
    shutdown_timeout   seconds that running answers have after the signal to stop
    quiet              do not print a line for each request
    replicas, ray, cpus    servers behind this address, on the Ray cluster at the address `ray` ("auto": that of this
                       machine, or a new one); `cpus` is the number of each
    """
    options, rnn = _read_model(
        model,
        tokenizer,
        policy,
        size,
        positions=positions,
        state_dtype=state_dtype,
        recall=recall,
        recall_every=recall_every,
        recall_while_reading=recall_while_reading,
        archive=archive,
        archive_bytes=archive_bytes,
        search=search,
        device=device,
        dtype=dtype,
        backend=backend,
        compile=compile,
        revision=revision,
        trust_remote_code=trust_remote_code,
        lora=None if lora is None else os.fspath(lora),
    )
    setup = Setup(
        _name_of(options, rnn) if served_model_name is None else served_model_name,
        options,
        auto=options is not None and positions == AUTO,
        slots=slots,
        prompt_tokens=prompt_tokens,
        guesses=guesses,
        draft=None if draft is None else _read_draft(draft, options),
        api_key=_as_tuple("api_key", api_key),
        allowed_host=_as_tuple("allowed_host", allowed_host),
        cors_origin=_as_tuple("cors_origin", cors_origin),
        sessions=None if sessions is None else Path(sessions),
        session_bytes=session_bytes,
        session_days=session_days,
        prefix_states=None if prefix_states is None else Path(prefix_states),
        prefix_disk_bytes=prefix_disk_bytes,
        max_tokens=max_tokens,
        max_total_tokens=max_total_tokens,
        generation_config=generation_config,
        chat_template=None if chat_template is None else read_chat_template(Path(chat_template)),
        tool_call_parser=tool_call_parser,
        allow_special_tokens=allow_special_tokens,
        protect=protect,
        queue=queue,
        max_body_bytes=max_body_bytes,
    )
    tls = [None if file is None else Path(file) for file in (ssl_certfile, ssl_keyfile)]
    address = Address(host, port, shutdown_timeout, quiet, *tls)
    check_replicas(replicas, ray, cpus, loaded=rnn is not None)
    check_packages()
    _start(setup, address, rnn, tokenizer, replicas or 1, ray, cpus)


def _start(
    setup: Setup,
    address: Address,
    rnn: MultiStateRNN | None,
    tokenizer: Any,
    replicas: int,
    ray: str | None,
    cpus: int | None,
) -> None:
    """Bind the address, which takes no time, before the model is loaded; then run the server."""
    from msrnn.server.http_server import bind

    listener = bind(address.host, address.port) if is_first() else None
    with listener or nullcontext():
        names = (address.host,) if listener is None else (address.host, listener.getsockname()[0])
        limits = setup.make_limits(names)
        if listener is not None:
            setup.note_access(address.host)
        from msrnn.server.run import Bound, follow_server, run_replicas, run_server

        if ray is not None and listener is not None:
            return run_replicas(setup, replicas, ray, cpus, Bound(address, listener, limits))
        if setup.model is not None:
            rnn, tokenizer = setup.model.load()
        assert rnn is not None
        if listener is None:
            return follow_server(rnn)
        return run_server(setup, rnn, tokenizer, Bound(address, listener, limits))


_OF_A_DRAFT = ("device", "dtype", "backend", "compile", "trust_remote_code")  # options that it has from the model


def _read_model(
    model: str | os.PathLike[str] | MultiStateRNN | None,
    tokenizer: Any,
    policy: str | Policy | None,
    size: SizeLike,
    **options: Any,
) -> tuple[ModelOptions | None, MultiStateRNN | None]:
    """The model to load, or the one that is loaded already."""
    if model is None or isinstance(model, str | os.PathLike):
        if tokenizer is not None:
            raise UsageError("is loaded with the model", name="tokenizer", advice="leave it out")
        value, bound = resolve(DEFAULT_POLICY if policy is None else policy, DEFAULT_SIZE if size is None else size)
        positions = ORIGINAL if options["positions"] == AUTO else options["positions"]
        name = None if model is None else os.fspath(model)
        return ModelOptions(name, value, bound, **{**options, "positions": positions}), None
    from msrnn.hf.rnn import MultiStateRNN

    if not isinstance(model, MultiStateRNN):
        raise UsageError(
            f"is a {type(model).__name__}, and must be a name, a folder or a MultiStateRNN",
            name="model",
            advice="wrap it: MultiStateRNN(model, policy, size)",
        )
    if tokenizer is None:
        raise UsageError("is needed with a MultiStateRNN", name="tokenizer", advice="give that of the model")
    given = {"policy": policy, "size": size, **options}
    for name, value in given.items():
        if value not in (None, AUTO, False) and value != _UNSET.get(name):
            raise UsageError("the MultiStateRNN has its own", name=name, value=value, advice="leave it out")
    return None, model


def _read_draft(draft: str | os.PathLike[str], options: ModelOptions | None) -> ModelOptions:
    """The draft model to load, where the model is."""
    if not isinstance(draft, str | os.PathLike):
        reason = f"is a {type(draft).__name__}, and must be a name or a folder"
        raise UsageError(reason, name="draft", advice="give a MultiStateRNN to Engine(draft=)")
    name, like = os.fspath(draft), options or ModelOptions()
    shared: Any = {field: getattr(like, field) for field in _OF_A_DRAFT}
    return ModelOptions(name, **shared)


def _name_of(options: ModelOptions | None, rnn: MultiStateRNN | None) -> str:
    if rnn is not None:
        return str(rnn.config.name_or_path) or type(rnn.model).__name__
    return (options and options.model) or SMALL


def _as_tuple(name: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """One string, or several. An error does not show the value: it may be a key."""
    several = (given,) if isinstance(given, str) else () if given is None else given
    if not isinstance(several, Collection) or not all(isinstance(one, str) for one in several):
        raise UsageError(f"is of type {type(given).__name__}, and must be a string or a list of strings", name=name)
    return tuple(several)
