from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn.cli.history import history
from msrnn.cli.options import (
    ORIGINAL,
    Device,
    Force,
    MaxNewTokens,
    Model,
    Sample,
    SavedDtype,
    SavedPolicy,
    SavedSize,
    SavedStateDtype,
    SaveTo,
    Seed,
    Speech,
    Temperature,
    TopP,
    state_of,
)
from msrnn.cli.saved import choose
from msrnn.cli.saving import check_target, keep, same_file
from msrnn.cli.terminal import note, summary
from msrnn.errors import UsageError
from msrnn.hf import chat_template as turns

if TYPE_CHECKING:
    from msrnn.cli.conversation import Conversation

AUTO = "auto"
Positions = Annotated[
    str,
    Option(
        help="Where kept tokens stand: original, compressed (or compressed:ln, compressed:sqrt, compressed:16), "
        "fitted, compact; auto: the saved state's, or original until the model's length is passed."
    ),
]
COMMANDS = "/state, /save FILE and /quit"


def chat(
    system: Annotated[str | None, Option(help="What the model is told first.", show_default=False)] = None,
    load: Annotated[Path | None, Option(help="Go on with this saved conversation.", show_default=False)] = None,
    save: SaveTo = None,
    force: Force = False,
    max_new_tokens: MaxNewTokens = 512,
    sample: Sample = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    model: Model = None,
    policy: SavedPolicy = None,
    size: SavedSize = None,
    device: Device = "auto",
    dtype: SavedDtype = None,
    state_dtype: SavedStateDtype = None,
    positions: Positions = AUTO,
    seed: Seed = None,
) -> None:
    """Talk for ever: the conversation is one bounded state, and only what is new is read.

    Until the model's length may be passed, positions are original; from there on they are compressed, and nothing but
    the first token stays that is farther back than that length. Give --positions, and nothing changes on the way.
    Ctrl-C stops an answer; /state, /save FILE and /quit are commands. With --load, options that are not given are those
    of the saved conversation.

    Examples:
        msrnn chat --system "Answer briefly." --save talk.safetensors
        msrnn chat --load talk.safetensors --save talk.safetensors
        printf 'Hello!\\n/state\\n' | msrnn chat --size 256
    """
    auto = positions == AUTO
    speech = Speech(max_new_tokens, sample, temperature, top_p)
    given = model, policy, size, device, dtype, seed, state_dtype, None if auto else positions
    choice = choose(load, *given, adopt=auto)
    check_target(save, force or same_file(save, load), [model])
    if system and load:
        raise UsageError(f"--system {system!r}: {load} has begun already; leave --system out, or --load")
    rnn, tokenizer = choice.load()
    turns.check_template(tokenizer)
    from msrnn.cli.beyond import Beyond
    from msrnn.cli.conversation import Conversation

    beyond = Beyond(choice) if auto and choice.positions == ORIGINAL else None
    talk = Conversation(rnn, tokenizer, state_of(rnn, load), speech, system, beyond)
    try:
        with history():
            _converse(talk, {path for path in (load, save) if path}, model)
    finally:
        if save:
            keep(talk.state, save)
            note(f"{save}: {summary(talk.state)}")
        elif sys.stdin.isatty():
            note("the conversation is not kept; --save FILE keeps it")


def _converse(talk: Conversation, mine: set[Path], model: str | None) -> None:
    """Line by line until the end of input; files in `mine` may be written again."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # else one byte that is no UTF-8 may end the conversation
    note(f"{summary(talk.state)}; commands are {COMMANDS}")
    for line in iter(_ask, None):
        match line.split(maxsplit=1):
            case []:
                continue
            case ["/quit"]:
                break
            case ["/state"]:
                print(summary(talk.state), flush=True)
            case ["/save", name]:
                _save(talk, Path(name), mine, model)
            case [word, *_] if word.startswith("/"):
                note(f"{line}: commands are {COMMANDS}")
            case _:
                talk.turn(line)


def _ask() -> str | None:
    """A line of the user's; None at the end of input, by Ctrl-D or Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            print()
        return None


def _save(talk: Conversation, path: Path, mine: set[Path], model: str | None) -> None:
    """A file that cannot be written is no reason to lose the conversation."""
    try:
        if path.exists() and not any(same_file(path, other) for other in mine):
            raise UsageError(f"{path}: exists already; name another file")
        check_target(path, force=True, inputs=[model])
        talk.state.save(path)
        mine.add(path)
        note(f"{path}: {summary(talk.state)}")
    except (ValueError, OSError) as error:
        note(str(error))
