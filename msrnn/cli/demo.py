from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text
from typer import Option

from msrnn.cli.files import MANUAL, manual, read_text
from msrnn.cli.options import Device, Dtype, LayerSize, Model
from msrnn.cli.terminal import note, progress, show_table, show_text
from msrnn.errors import UsageError
from msrnn.hf.model_options import ModelOptions
from msrnn.policy import FULL, Policy
from msrnn.size import resolve

if TYPE_CHECKING:
    from msrnn.evaluation.benchmark.reading import Measured

POLICIES = (FULL, Policy.parse("window+4"), Policy.parse("tova"))
COLUMNS = ("policy", "perplexity", "KV rows\nheld", "bytes\nheld", "ms/token\nreading", "ms/token\ndecoding")
LAST_TOKENS, NEW_TOKENS = 24, 48  # of the text, printed again; generated after them


def demo(
    text: Annotated[Path | None, Option(help="Text file to read.", show_default=MANUAL)] = None,
    tokens: Annotated[int, Option(help="Most tokens of the text to read.")] = 2048,
    size: LayerSize = 256,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Read one text under three policies, and compare perplexity, memory and time: a minute or two on two CPU cores.

    The policies are full (keeps every token), window+4 (keeps the newest tokens and the first four) and tova. Times are
    medians of runs at the end of the text, which the policies do in turns. Then tova continues the text.

    Examples:
        msrnn demo
        msrnn demo --size 128 --tokens 1024
        msrnn demo --text book.txt --tokens 4096 --size 512
    """
    if tokens < 2:
        raise UsageError(f"--tokens {tokens}: must be 2 or more, since the first token is not predicted")
    choices = [ModelOptions(model, *resolve(policy, size), device, dtype) for policy in POLICIES]
    check_size(size, tokens)
    prose = read_text(str(text)) if text else manual()
    rnn, tokenizer = choices[0].load()
    from msrnn.cli.answer_streamer import AnswerStreamer
    from msrnn.evaluation.benchmark.reading import estimate_seconds, measure, tokens_of
    from msrnn.hf.chat_template import encode

    ids = encode(tokenizer, prose, add_special_tokens=True)[:, :tokens]
    if ids.shape[1] < 2:
        raise UsageError(f"{text}: {ids.shape[1]} token; give a longer text")
    check_size(size, ids.shape[1])
    note(announcement(ids.shape[1], len(choices) * estimate_seconds(rnn, ids)))
    rnns = [choice.rnn(rnn.model) for choice in choices]
    with progress() as bar:
        tasks = [bar.add_task(choice.policy.name.ljust(8), total=tokens_of(ids.shape[1])) for choice in choices]
        rows, states = measure(rnns, ids, [partial(bar.advance, task) for task in tasks])
        for task in tasks:
            bar.update(task, total=bar.tasks[task].completed)  # times that disagree are measured again
    show_table(f"{ids.shape[1]:,} tokens", COLUMNS, [cells(row) for row in rows])
    show_text(remark(rows))
    show_text(f"{rows[-1].policy} continues the text:")
    Console().print(Text(str(tokenizer.decode(ids[0, -LAST_TOKENS:])), style="dim"), end="", soft_wrap=True)
    answer = AnswerStreamer(tokenizer)
    rnns[-1].generate(ids[:, -1:], state=states[-1], streamer=answer, do_sample=False, max_new_tokens=NEW_TOKENS)
    print()
    show_text(verdict(rows))


def check_size(size: int, tokens: int) -> None:
    """Refuse a size at which nothing is evicted: all policies are the same. The text's last token is not read."""
    if size >= tokens - 1:
        raise UsageError(
            f"--size {size}: nothing is evicted from a text of {tokens:,} tokens, so all policies are the same; "
            f"use a size below {tokens - 1:,}, or a longer text and more --tokens"
        )


def cells(row: Measured) -> list[str]:
    times = (f"{times.median:.1f}" for times in (row.reading, row.decoding))
    return [row.policy, f"{row.perplexity:.2f}", f"{row.rows:,}", decimal(row.nbytes), *times]


def announcement(tokens: int, seconds: float) -> str:
    """The next step, and about how long it takes."""
    took = f"{max(2, round(seconds))} seconds" if seconds < 90 else f"{round(seconds / 60)} minutes"
    return (
        f"reading {tokens:,} tokens under {len(POLICIES)} policies, and parts of them again to time it: about {took}, "
        "more if the machine is busy"
    )


def remark(rows: list[Measured]) -> str:
    """Remarks on the conditions of the times."""
    from msrnn.evaluation.benchmark.timing import busy_remark

    unsteady = [row.policy for row in rows if not row.steady]
    return " ".join(["Times are medians of repeated runs.", *([busy_remark(unsteady)] if unsteady else [])])


def verdict(rows: list[Measured]) -> str:
    """The result of the table, in one sentence."""
    full, *bounded = rows
    largest = max(bounded, key=lambda row: row.nbytes)
    changes = (f"{row.perplexity / full.perplexity - 1:+.1%} under {row.policy}" for row in bounded)
    return (
        f"Holding {largest.rows:,} of {full.rows:,} KV rows per layer ({decimal(largest.nbytes)} instead of "
        f"{decimal(full.nbytes)}) changes perplexity by {' and '.join(changes)}."
    )
