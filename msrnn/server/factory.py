"""Make a server from its setup and a loaded model: in this process, or as one of several replicas."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrnn.errors import UsageError
from msrnn.hf.chat_template import with_template
from msrnn.hf.model_options import AUTO
from msrnn.server.affinity import assign_replica
from msrnn.server.call_detection import find_format
from msrnn.server.defaults import sampling_defaults
from msrnn.server.engines import make_engine
from msrnn.server.limits import Limits
from msrnn.server.protocol import Served
from msrnn.server.server import Server
from msrnn.server.setup import Setup

if TYPE_CHECKING:
    from msrnn.hf.model_options import ModelOptions
    from msrnn.hf.rnn import MultiStateRNN


def make_server(
    setup: Setup,
    limits: Limits,
    rnn: MultiStateRNN,
    tokenizer: Any,
    shared: bool = False,
    number: int = 0,
    count: int = 1,
) -> Server:
    """Make the server of a loaded model.

    shared  whether other processes of the job have parts of the model
    number  the number of this replica, below `count`, the number of replicas
    """
    if setup.chat_template is not None:
        tokenizer = with_template(tokenizer, setup.chat_template)
    defaults = sampling_defaults(rnn.model.generation_config) if setup.generation_config == AUTO else {}
    prefixes = setup.prefix_states
    if prefixes is not None and count > 1:
        prefixes = prefixes / f"replica-{number}"
    engine = make_engine(
        rnn,
        setup.slots,
        setup.model if setup.auto else None,
        shared,
        tokenizer=tokenizer,
        prompt_tokens=setup.prompt_tokens,
        guesses=setup.guesses,
        draft=None if setup.draft is None else load_draft(setup.draft, tokenizer, shared),
        prefix_folder=prefixes,
        prefix_disk_bytes=setup.prefix_disk_bytes // count,
        sessions=setup.sessions,
        session_bytes=setup.session_bytes and max(1, setup.session_bytes // count),
        session_days=setup.session_days,
        owns_session=lambda name: assign_replica(name, count) == number,
    )
    tokens = (setup.max_tokens, setup.max_total_tokens)
    served = Served(
        setup.served_model_name,
        tokenizer,
        *tokens,
        engine.sessions,
        defaults,
        allow_special=setup.allow_special_tokens,
        protect=setup.protect,
        calls=find_format(tokenizer, setup.tool_call_parser),
    )
    return Server(engine, served, limits)


def load_draft(options: ModelOptions, tokenizer: Any, shared: bool) -> MultiStateRNN:
    """Load the model that guesses. Refuses one with other tokens, whose guesses would all be wrong."""
    if shared:
        advice = "leave it out, or use one process"
        reason = "a model that processes share cannot take guesses back"
        raise UsageError(reason, name="draft", value=options.model, advice=advice)
    rnn, own = options.load()
    theirs, mine = ({number: token for token, number in one.get_vocab().items()} for one in (own, tokenizer))
    if any(theirs[number] != mine[number] for number in theirs.keys() & mine.keys()):
        advice = "use a smaller model of the same family"
        raise UsageError("has other tokens than the model", name="draft", value=options.model, advice=advice)
    return rnn


def make_replica(setup: Setup, limits: Limits, marker: Path | None, count: int, number: int) -> Server:
    """Load the model and make the server of a replica, in a process of its own.

    marker  a file in the folder of sessions, which all replicas must see
    """
    assert setup.model is not None
    if marker is not None and not marker.exists():
        raise UsageError(
            "not the same folder on every machine",
            name="sessions",
            value=str(setup.sessions),
            advice="name one that all share",
        )
    server = make_server(setup, limits, *setup.model.load(), number=number, count=count)
    server.engine.warm_up()
    return server
