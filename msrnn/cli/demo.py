from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text
from typer import Option

from msrnn.cli.options import Choice, Device, Dtype, Model, Size
from msrnn.cli.tables import show_table, show_text
from msrnn.cli.terminal import progress
from msrnn.cli.text import encode, read_text
from msrnn.errors import UsageError
from msrnn.policy import FULL

if TYPE_CHECKING:
    from msrnn.evaluation.loss import Measured

POLICIES = (FULL, "window+4", "tova")
TOPICS = ("objects", "naming", "exceptions", "import", "customization", "attribute-access", "types", "compound")
COLUMNS = ("policy", "perplexity", "states\nheld", "bytes\nheld", "ms/token\nreading", "ms/token\ndecoding")
TAIL, CONTINUATION = 24, 48  # tokens of the text shown again, tokens that go on from it


def demo(
    text: Annotated[Path | None, Option(help="Read this file.", show_default="Python's own manual")] = None,
    tokens: Annotated[int, Option(help="Tokens to read at most.")] = 2048,
    size: Size = 256,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """One text under three policies: what it costs to remember everything, and what forgetting loses.

    Examples:
        msrnn demo
        msrnn demo --size 128 --tokens 1024
        msrnn demo --text book.txt --tokens 4096 --size 512
    """
    if tokens < 2:
        raise UsageError(f"--tokens {tokens}: must be 2 or more, since the first token is given")
    choices = [Choice(model, policy, size, device, dtype) for policy in POLICIES]
    check_size(size, tokens)
    prose = read_text(str(text)) if text else manual()
    rnn, tokenizer = choices[0].load()
    from msrnn.cli.voice import Voice
    from msrnn.evaluation.loss import measure
    from msrnn.hf.rnn import MultiStateRNN

    ids = encode(tokenizer, prose, opening=True)[:, :tokens]
    if ids.shape[1] < 2:
        raise UsageError(f"{text}: {ids.shape[1]} token; give a longer text")
    check_size(size, ids.shape[1])
    rows = []
    with progress() as bar:
        for choice in choices:
            rnn = MultiStateRNN(rnn.model, choice.policy, choice.size)
            task = bar.add_task(choice.policy.ljust(8), total=ids.shape[1] - 1)
            row, state = measure(rnn, ids, partial(bar.advance, task))
            rows.append(row)
    show_table(f"{ids.shape[1]:,} tokens", COLUMNS, [shown(row) for row in rows])
    show_text(f"{rows[-1].policy} goes on from the end of the text:")
    Console().print(Text(str(tokenizer.decode(ids[0, -TAIL:])), style="dim"), end="", soft_wrap=True)
    rnn.generate(ids[:, -1:], state=state, streamer=Voice(tokenizer), do_sample=False, max_new_tokens=CONTINUATION)
    print()
    show_text(verdict(rows))


def manual() -> str:
    """Prose that every Python carries: chapters of its language reference, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in TOPICS)


def check_size(size: int, tokens: int) -> None:
    """Where nothing is evicted there is nothing to compare; the last token is not read."""
    if size >= tokens - 1:
        raise UsageError(
            f"--size {size}: a text of {tokens:,} tokens fits into it, so that nothing is evicted and all policies are "
            f"the same; take a size below {tokens - 1:,}, or a longer text and more --tokens"
        )


def shown(row: Measured) -> list[str]:
    times = (f"{seconds * 1e3:.1f}" for seconds in (row.reading, row.decoding))
    return [row.policy, f"{row.perplexity:.2f}", f"{row.states:,}", decimal(row.nbytes), *times]


def verdict(rows: list[Measured]) -> str:
    """What the table shows, in one sentence."""
    full, *bounded = rows
    largest = max(bounded, key=lambda row: row.nbytes)
    changes = (f"{row.perplexity / full.perplexity - 1:+.1%} under {row.policy}" for row in bounded)
    return (
        f"Holding {largest.states:,} of {full.states:,} states ({decimal(largest.nbytes)} instead of "
        f"{decimal(full.nbytes)}) changes perplexity by {' and '.join(changes)}."
    )
