from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from msrnn.checks import check_count
from msrnn.cli.files import check_target, checkpoint_path, read_text, same_file, save_state
from msrnn.cli.model_options import GivenOptions, load_or_empty
from msrnn.cli.options import Force, SavedState
from msrnn.cli.past_training import rnn_for
from msrnn.cli.terminal import Stopped, note, note_dropped, progress, summary
from msrnn.core.torchrun import is_torchrun
from msrnn.errors import FileError, UsageError

if TYPE_CHECKING:
    from msrnn.core.state import MultiState
    from msrnn.hf.long_read import LongRead
    from msrnn.hf.rnn import MultiStateRNN


def read(
    file: Annotated[str, Argument(help="The text file to read; - reads standard input.")],
    *,
    save: Annotated[Path, Option(help="Write the state to this file.")],
    load: SavedState = None,
    tokens: Annotated[int | None, Option(help="Most tokens of the text to read.", show_default="all")] = None,
    protect: Annotated[
        bool, Option("--protect", help="Never evict the tokens of this text; more than fit are refused before reading.")
    ] = False,
    force: Force = False,
    given: GivenOptions,
) -> None:
    """Read a text once and save the state: a file of constant size, to continue from.

    With --recall the file also has the keys and values of every token, and grows with the text. Questions then recall
    the rows that they ask for, and not only what the state has kept: read once, ask many times.

    With --protect, the state keeps all tokens of this text, whatever is read after it. They must fit into the state,
    beside the rows that the policy needs for itself. `msrnn chat` keeps them with --protect system.

    Ctrl-C stops, and the same command continues: a checkpoint is saved every 30 seconds as FILE.partial, next to the
    file to save to, and removed at the end. With --state, options that are not given are those of the saved state.

    With --positions auto, a text that passes the training length is read with a horizon and compressed positions from
    its beginning; a saved state that has not passed it is converted. Any other --positions stays as it is.

    Examples:
        msrnn read book.txt --save book.safetensors
        msrnn generate "The moral of the story is" --state book.safetensors
        msrnn read sequel.txt --state book.safetensors --save both.safetensors
        msrnn read ten_books.txt --policy echo --save books.safetensors
        msrnn read rules.txt --protect --size 1024 --save rules.safetensors
        msrnn read book.txt --recall 256 --save book.state
        msrnn read book.txt --recall 64 --archive-bytes 4000000000 --save 4gb.state
        msrnn generate "Who finds the letter?" --chat --state book.state --recall 256
    """
    if tokens is not None:
        check_count("tokens", tokens)
    options = given.complete(load)
    check_target(save, force or same_file(save, load), [file, given.model])
    checkpoint = checkpoint_path(save)
    check_target(checkpoint, force=True, inputs=[file, given.model, load])
    text = read_text(file)
    rnn, tokenizer = options.load()
    from msrnn.hf.chat_template import encode
    from msrnn.hf.long_read import LongRead

    whole = encode(tokenizer, text, add_special_tokens=load is None)
    reading = LongRead(whole[:, :tokens], checkpoint, load, protect)
    begun, remarks = load_or_empty(rnn, load), list[str]()
    before = int(begun.seen[0])

    def extend(done: int) -> MultiStateRNN:
        remarks.clear()
        return rnn_for(rnn, options, given.auto, before + done, reading.total - done, remarks.append)

    extended, state = _resume(reading, rnn, extend, force)
    if state is None:
        state = begun if extended is rnn else extended.convert_state(begun) if load else extended.state()
    rnn = extended
    if protect:
        _check_protect(reading, rnn, state)
    for remark in remarks:  # now that nothing is refused any more
        note(remark)
    speed = _run(reading, rnn, state)
    note_dropped(state)
    save_state(state, save)
    checkpoint.unlink(missing_ok=True)
    left = whole.shape[1] - reading.total
    rest = f"; --tokens {tokens} leaves {left:,} tokens of the text unread" if left else ""
    print(f"{save}: {summary(state)} ({speed:,.0f} tokens/s){rest}")


def _check_protect(reading: LongRead, rnn: MultiStateRNN, state: MultiState) -> None:
    try:
        reading.check_protect(rnn, state)
    except UsageError as error:
        advice = "read fewer --tokens, use a larger --size, or leave --protect out"
        raise UsageError(error.message, name="protect", advice=advice) from error


def _resume(
    reading: LongRead, rnn: MultiStateRNN, extend: Callable[[int], MultiStateRNN], force: bool
) -> tuple[MultiStateRNN, MultiState | None]:
    """The model to continue with, and the state of an interrupted read; None: start from the beginning.

    `extend(done)` is the model for the tokens after the first `done`. A checkpoint with original positions is converted
    to it, unless it has passed the training length.
    """
    extended = extend(0)
    try:
        if extended is not rnn and reading.checkpoint.exists() and _has_positions_of(rnn, reading.checkpoint):
            state = reading.resume(rnn)
            extended = extend(reading.done)
            if state is not None and extended is not rnn:
                state = extended.convert_state(state)
        else:
            state = reading.resume(extended)
    except UsageError as reason:
        if force:
            note(f"{reading.checkpoint}: {reason}; reading starts from the beginning")
            return extended, None
        raise FileError(
            f"a checkpoint that does not fit this command ({reason})",
            reading.checkpoint,
            advice="add --force to start from the beginning, or name another file to save to",
        ) from reason
    if state is not None:
        note(f"continuing after {reading.done:,} of {reading.total:,} tokens")
    return extended, state


def _has_positions_of(rnn: MultiStateRNN, path: Path) -> bool:
    from msrnn.core.state_file import load_description

    return bool(load_description(path).get("positions") == rnn.spec.fingerprint["positions"])


def _run(reading: LongRead, rnn: MultiStateRNN, state: MultiState) -> float:
    """Read with a progress bar; returns tokens per second. Ctrl-C saves a checkpoint and raises `Stopped`."""
    started, resumed_at = perf_counter(), reading.done
    shared, ctrl_c = is_torchrun(), CtrlC()
    with progress() as bar, nullcontext() if shared else ctrl_c:
        task = bar.add_task("reading", total=reading.total, completed=reading.done)

        def on_tokens(count: int) -> None:
            bar.advance(task, count)
            if ctrl_c.pressed:
                raise KeyboardInterrupt

        def on_failure(error: Exception) -> None:
            note(f"no checkpoint can be saved, reading continues ({error})")

        try:
            reading.run(rnn, state, on_tokens, on_failure)
        except KeyboardInterrupt:
            if shared:  # the processes have stopped at different tokens
                raise Stopped("stopped; run the same command to continue from the last checkpoint") from None
            raise Stopped(_save_checkpoint(reading, rnn, state)) from None
    return (reading.total - resumed_at) / max(perf_counter() - started, 1e-9)


def _save_checkpoint(reading: LongRead, rnn: MultiStateRNN, state: MultiState) -> str:
    """Save what was read before Ctrl-C; what to tell the user."""
    if not reading.done:
        return "stopped before anything was read"
    how = "run the same command to continue"
    try:
        save_state(state, reading.checkpoint, reading.notes(reading.done, rnn))
    except UsageError as error:  # stopped inside a block, or the disk is full
        more = f"; {how} from the last checkpoint" if reading.checkpoint.exists() else ""
        return f"stopped; the state was not saved ({error}){more}"
    return f"stopped after {reading.done:,} of {reading.total:,} tokens; {how} from there ({reading.checkpoint})"


class CtrlC:
    """The first Ctrl-C waits for the end of the block, since a state inside a block cannot be saved; the second
    interrupts at once."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> CtrlC:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def _press(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        # Not print: the signal may have interrupted a print.
        os.write(2, b"\nstopping at the end of this block; press Ctrl-C again to stop at once\n")

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
