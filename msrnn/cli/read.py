from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

from typer import Argument, Option

from msrnn.cli.options import (
    ORIGINAL,
    Choice,
    Device,
    Dtype,
    Force,
    Model,
    PolicyName,
    Positions,
    Seed,
    Size,
    StateDtype,
    state_of,
)
from msrnn.cli.terminal import progress, summary
from msrnn.cli.text import check_target, encode, read_text


def read(
    file: Annotated[str, Argument(help="A text file; - is standard input.")],
    save: Annotated[Path, Option(help="Write the state to this file.")],
    load: Annotated[Path | None, Option(help="Go on from this saved state.", show_default=False)] = None,
    force: Force = False,
    model: Model = None,
    policy: PolicyName = "tova",
    size: Size = 512,
    device: Device = "auto",
    dtype: Dtype = None,
    state_dtype: StateDtype = None,
    positions: Positions = ORIGINAL,
    seed: Seed = None,
) -> None:
    """Read a text once and keep the state: a file of fixed size to ask, fork or go on from.

    Examples:
        msrnn read book.txt --save book.safetensors
        msrnn generate "The moral of the story is" --state book.safetensors
        msrnn read sequel.txt --load book.safetensors --save both.safetensors
        msrnn read ten_books.txt --positions compressed --save books.safetensors
    """
    choice = Choice(model, policy, size, device, dtype, seed, state_dtype, positions)
    check_target(save, force or save == load)
    choice.check_state(load)
    text = read_text(file)
    rnn, tokenizer = choice.load()
    state = state_of(rnn, load)
    ids = encode(tokenizer, text, opening=load is None)
    started = perf_counter()
    with progress() as bar:
        task = bar.add_task("reading", total=ids.shape[1])
        rnn.read(ids, state, last_only=True, on_block=lambda columns: bar.advance(task, columns))
    speed = ids.shape[1] / (perf_counter() - started)
    state.save(save)
    print(f"{save}: {summary(state)} ({speed:,.0f} tokens/s)")
