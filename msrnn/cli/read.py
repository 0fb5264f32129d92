from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from msrnn.cli.options import (
    Device,
    Force,
    Model,
    SavedDtype,
    SavedPolicy,
    SavedPositions,
    SavedSize,
    SavedStateDtype,
    Seed,
    state_of,
)
from msrnn.cli.saved import choose
from msrnn.cli.saving import check_target, keep, partial_of, same_file
from msrnn.cli.terminal import note, summary
from msrnn.cli.text import encode, read_text
from msrnn.errors import UsageError


def read(
    file: Annotated[str, Argument(help="A text file; - is standard input.")],
    save: Annotated[Path, Option(help="Write the state to this file.")],
    load: Annotated[Path | None, Option(help="Go on from this saved state.", show_default=False)] = None,
    tokens: Annotated[int | None, Option(help="Tokens to read at most.", show_default="all")] = None,
    force: Force = False,
    model: Model = None,
    policy: SavedPolicy = None,
    size: SavedSize = None,
    device: Device = "auto",
    dtype: SavedDtype = None,
    state_dtype: SavedStateDtype = None,
    positions: SavedPositions = None,
    seed: Seed = None,
) -> None:
    """Read a text once and keep the state: a file of fixed size to ask, fork or go on from.

    Ctrl-C stops, and the same command goes on: every half minute a checkpoint is saved as FILE.partial beside the file
    to save to, which is removed at the end. With --load, options that are not given are those of the saved state.

    Examples:
        msrnn read book.txt --save book.safetensors
        msrnn generate "The moral of the story is" --state book.safetensors
        msrnn read sequel.txt --load book.safetensors --save both.safetensors
        msrnn read ten_books.txt --positions compressed --save books.safetensors
    """
    if tokens is not None and tokens < 1:
        raise UsageError(f"--tokens {tokens}: must be 1 or more")
    choice = choose(load, model, policy, size, device, dtype, seed, state_dtype, positions)
    check_target(save, force or same_file(save, load), [file, model])
    check_target(partial_of(save), force=True, inputs=[file, model, load])
    text = read_text(file)
    rnn, tokenizer = choice.load()
    from msrnn.cli.beyond import warn_beyond
    from msrnn.cli.checkpoint import Checkpoint, read_on

    whole = encode(tokenizer, text, opening=load is None)
    ids = whole[:, :tokens]
    checkpoint = Checkpoint(save, ids, load)
    if found := checkpoint.resume(rnn, force):
        state, done = found
        note(f"going on after {done:,} of {ids.shape[1]:,} tokens")
    else:
        state, done = state_of(rnn, load), 0
    warn_beyond(rnn, choice, int(state.seen[0]) + ids.shape[1] - done)
    speed = read_on(rnn, ids, state, done, checkpoint)
    keep(state, save)
    checkpoint.remove()
    left = whole.shape[1] - ids.shape[1]
    rest = f"; {left:,} tokens of the text are left, as --tokens asks" if left else ""
    print(f"{save}: {summary(state)} ({speed:,.0f} tokens/s){rest}")
