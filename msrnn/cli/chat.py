from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn import turns
from msrnn.cli.options import (
    ORIGINAL,
    Choice,
    Device,
    Dtype,
    Force,
    MaxNewTokens,
    Model,
    PolicyName,
    Positions,
    Sample,
    SaveTo,
    Seed,
    Size,
    Speech,
    StateDtype,
    Temperature,
    TopP,
    state_of,
)
from msrnn.cli.terminal import note, summary
from msrnn.cli.text import check_target

if TYPE_CHECKING:
    from msrnn.cli.conversation import Conversation

AUTO = "auto"
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
    policy: PolicyName = "tova",
    size: Size = 512,
    device: Device = "auto",
    dtype: Dtype = None,
    state_dtype: StateDtype = None,
    positions: Positions = AUTO,
    seed: Seed = None,
) -> None:
    """Talk for ever: the conversation is one bounded state, and only what is new is read.

    Until the model's length may be passed, positions are original; from there on they are compressed, and nothing but
    the first token stays that is farther back than that length. Give --positions, and nothing changes on the way.
    Ctrl-C stops an answer; /state, /save FILE and /quit are commands.

    Examples:
        msrnn chat --system "Answer briefly." --save talk.safetensors
        msrnn chat --load talk.safetensors --save talk.safetensors
        printf 'Hello!\\n/state\\n' | msrnn chat --size 256
    """
    auto = positions == AUTO
    choice = Choice(model, policy, size, device, dtype, seed, state_dtype, ORIGINAL if auto else positions)
    choice = choice.as_saved(load) if auto else choice
    speech = Speech(max_new_tokens, sample, temperature, top_p)
    check_target(save, force or save == load)
    if system and load:
        raise ValueError(f"--system {system!r}: {load} has begun already; leave --system out, or --load")
    choice.check_state(load)
    rnn, tokenizer = choice.load()
    turns.check_template(tokenizer)
    from msrnn.cli.beyond import Beyond
    from msrnn.cli.conversation import Conversation

    beyond = Beyond(choice) if auto and choice.positions == ORIGINAL else None
    talk = Conversation(rnn, tokenizer, state_of(rnn, load), speech, system, beyond)
    try:
        _converse(talk, {path for path in (load, save) if path})
    finally:
        if save:
            talk.state.save(save)
            note(f"{save}: {summary(talk.state)}")


def _converse(talk: Conversation, mine: set[Path]) -> None:
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
                _save(talk, Path(name), mine)
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


def _save(talk: Conversation, path: Path, mine: set[Path]) -> None:
    """A file that cannot be written is no reason to lose the conversation."""
    try:
        if path.exists() and path not in mine:
            raise ValueError(f"{path}: exists already; name another file")
        check_target(path, force=True)
        talk.state.save(path)
        mine.add(path)
        note(f"{path}: {summary(talk.state)}")
    except (ValueError, OSError) as error:
        note(str(error))
