from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.checks import check_choice
from msrnn.cli.files import as_utf8, check_target, same_file, save_state, user_state_folder
from msrnn.cli.model_options import GivenOptions, check_chat_template, load_or_empty
from msrnn.cli.options import Force, MaxNewTokens, Protect, SamplingOptions, SaveTo
from msrnn.cli.past_training import extend_rnn
from msrnn.cli.terminal import note, note_dropped, summary
from msrnn.core.atomic import PRIVATE, make_private_folder, write_atomically
from msrnn.errors import FileError, UsageError
from msrnn.hf.model_options import ORIGINAL, PROTECT

if TYPE_CHECKING:
    from msrnn.cli.conversation import Conversation
    from msrnn.hf.rnn import MultiStateRNN


MOST_LINES = 1000  # lines of earlier conversations that are kept
COMMANDS = "/state, /save FILE and /quit"
System = Annotated[str | None, Option(help="System message that opens the conversation.", show_default="none")]
SavedChat = Annotated[
    Path | None, Option("--state", "--load", help="Continue this saved conversation.", show_default="a new one")
]


def chat(
    *,
    system: System = None,
    load: SavedChat = None,
    save: SaveTo = None,
    force: Force = False,
    protect: Protect = "none",
    max_new_tokens: MaxNewTokens = 512,
    sampling: SamplingOptions,
    given: GivenOptions,
) -> None:
    """Chat without end: the conversation is one state of constant size, and each turn reads only the new message.

    Ctrl-C stops an answer. The commands are /state, /save FILE and /quit. With --state, options that are not given are
    those of the saved conversation.

    With --positions auto, a conversation continues with a horizon and compressed positions before it may pass the
    training length; a saved one that has passed it stays as it is. So does any other --positions.

    With --recall, all turns are archived, and a message and its answer recall the rows that they ask for. With
    --archive-bytes, the oldest turns are dropped when the archive is full, and a note says so.

    Examples:
        msrnn chat --system "Answer briefly." --protect system --save talk.safetensors
        msrnn chat --state talk.safetensors --save talk.safetensors
        msrnn chat --recall 256 --save talk.safetensors
        printf 'Hello!\\n/state\\n' | msrnn chat --size 256
    """
    settings = sampling.settings(max_new_tokens)
    check_choice("--protect", protect, PROTECT)
    options = given.complete(load)
    check_target(save, force or same_file(save, load), [given.model])
    if system and load:
        raise UsageError(f"--system {system!r}: {load} is a conversation that has begun; leave out --system or --state")
    rnn, tokenizer = options.load()
    check_chat_template(tokenizer, "use `msrnn generate` without --chat")
    from msrnn.cli.conversation import Conversation

    state = load_or_empty(rnn, load)
    if protect != "system" and (kept := sum(end - begin for begin, end in state.protected[0])):
        note(f"{kept:,} protected tokens of {load} may be evicted from now on; --protect system keeps them")

    def extend(length: int) -> MultiStateRNN:
        return extend_rnn(rnn, options, length, int(conversation.state.seen[0]))

    conversation = Conversation(
        rnn,
        tokenizer,
        state,
        settings,
        as_utf8(system) if system else None,
        extend if given.auto and options.positions == ORIGINAL else None,
        protect,
    )
    try:
        with line_history():
            _converse(conversation, {path for path in (load, save) if path}, given.model)
    finally:
        if save:
            save_state(conversation.state, save)
            note(f"{save}: {summary(conversation.state)}")
        elif sys.stdin.isatty():
            note("the conversation is not saved; --save FILE saves it")


def _converse(conversation: Conversation, own_files: set[Path], model: str | None) -> None:
    """Answer line by line until the end of input. `/save` may replace the files in `own_files`."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # else a byte that is not UTF-8 may end the conversation
    note(f"{summary(conversation.state)}; commands are {COMMANDS}")
    for line in iter(_next_line, None):
        match line.split(maxsplit=1):
            case []:
                continue
            case ["/quit"]:
                break
            case ["/state"]:
                print(summary(conversation.state), flush=True)
            case ["/save", name]:
                _save(conversation, Path(name), own_files, model)
            case [word, *_] if word.startswith("/"):
                note(f"{line}: commands are {COMMANDS}")
            case _:
                _answer(conversation, line)


def _answer(conversation: Conversation, line: str) -> None:
    message = as_utf8(line)
    try:
        conversation.encode(message)
    except UsageError as error:  # this message cannot be rendered, another one may
        note(str(error))
        return
    dropped = max(conversation.state.dropped_tokens)
    turn = conversation.turn(message)
    note_dropped(conversation.state, dropped)
    if turn.interrupted:
        note("stopped; the answer so far stays in the conversation")
    if turn.cut:
        note(f"cut at --max-new-tokens {conversation.settings['max_new_tokens']}")


def _next_line() -> str | None:
    """A line that the user typed; None at the end of input, by Ctrl-D or Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            print()
        return None


def _save(conversation: Conversation, path: Path, own_files: set[Path], model: str | None) -> None:
    """Save the state. A file that cannot be written does not end the conversation."""
    try:
        if path.exists() and not any(same_file(path, other) for other in own_files):
            raise FileError("exists already", path, advice="name another file")
        check_target(path, force=True, inputs=[model])
        conversation.state.save(path)
        own_files.add(path)
        note(f"{path}: {summary(conversation.state)}")
    except (ValueError, OSError) as error:  # ValueError: a null byte in the name
        note(str(error))


@contextmanager
def line_history() -> Iterator[None]:
    """Let `input` edit lines and recall earlier ones, if standard input is a terminal and Python has readline."""
    readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
    if readline is None:
        yield
        return
    try:
        path = user_state_folder() / "chat_history"
        _load_history(readline, path)
    except (OSError, RuntimeError) as error:  # no home folder, or a file that cannot be read
        note(f"earlier lines cannot be read ({error})")
        yield
        return
    loaded = readline.get_current_history_length()
    try:
        yield
    finally:
        _append_history(readline, path, loaded)


def _readline() -> Any:
    try:
        import readline
    except ImportError:
        return None
    return readline


def _load_history(readline: Any, path: Path) -> None:
    readline.clear_history()
    if path.exists():
        readline.read_history_file(path)


def _append_history(readline: Any, path: Path, loaded: int) -> None:
    """Append the lines after the first `loaded` to the file as it is now: another chat may have written to it."""
    new = [readline.get_history_item(n) for n in range(loaded + 1, readline.get_current_history_length() + 1)]
    if not new:
        return
    try:
        make_private_folder(path.parent)
        _load_history(readline, path)
        for line in new:
            readline.add_history(line)
        readline.set_history_length(MOST_LINES)
        write_atomically(path, readline.write_history_file, PRIVATE)
    except (OSError, ValueError) as error:
        note(f"the lines of this conversation are not saved ({error})")
