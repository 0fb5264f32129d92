from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.evaluation import (
    Books,
    EvaluationOptions,
    Text,
    check_batch,
    check_positions,
    computed,
    show_tables,
    write_report,
)
from msrnn.cli.options import LayerSize
from msrnn.cli.terminal import note
from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import check_source
from msrnn.hf.extension import REACH

NAME = "extrapolation"
ROWS = ("tova@compressed", "window+4@compact", "tova@original", "echo+1~{horizon}@compressed")
DEFAULT = ", ".join(ROWS).format(horizon=f"({REACH} times the size)")
Rows = Annotated[
    list[str] | None,
    Option("--row", metavar="POLICY@POSITIONS", help="A row of the table; repeat for more.", show_default=DEFAULT),
]
Tokens = Annotated[int, Option(help="Tokens to read of each text, from its first on.")]
Window = Annotated[int, Option(help="Tokens per point of the figure.")]
Leg = Annotated[int, Option(help="Tokens after which the state is saved, to resume from.")]
Seed = Annotated[int, Option(help="Random seed that selects texts if there are more than --books.")]
Batch = Annotated[int | None, Option(help="Texts read at once.", show_default="1 on cpu, all on cuda")]
Out = Annotated[Path, Option(help=f"Write {NAME}.jsonl, .md, .csv, .png and .svg here.")]


def extrapolation(
    *,
    text: Text = None,
    row: Rows = None,
    size: LayerSize = 512,
    tokens: Tokens = 70_000,
    window: Window = 1_000,
    leg: Leg = 10_000,
    books: Books = None,
    seed: Seed = 0,
    batch: Batch = None,
    out: Out = Path(f"results/{NAME}"),
    options: EvaluationOptions,
) -> None:
    """Perplexity far beyond the training length, on the first tokens of every text that is long enough.

    One state reads a text from its first token to its last, with exact eviction at every token. Each point is the mean
    over all tokens so far, and also over the window before it. A row is a policy and the positions of the tokens that
    it keeps: original, compact, compressed (or compressed:ln, compressed:sqrt). The state is saved in the folder after
    each leg, so an interrupted run resumes in the middle of a text.

    Examples:
        msrnn eval extrapolation --text books/ --tokens 20000 --books 4
        msrnn eval extrapolation --row tova@compressed --row tova@compact
        msrnn eval extrapolation --text all.txt --tokens 250000 --leg 50000
    """
    check_source(text)
    check_counts(tokens, window, leg, books=books)
    check_batch(batch=batch)
    from msrnn.evaluation.data.texts import PG19, Choice, choose, documents
    from msrnn.evaluation.environment import environment
    from msrnn.evaluation.tasks.extrapolation import CHECK, Course, Extrapolation, Report, cases, figure

    rows = cases(row or [name.format(horizon=REACH * size) for name in ROWS], size)
    options.check()
    texts = documents(text)
    store = options.open_store(out, NAME, CHECK)
    decoder, tokenizer = options.load()
    config = decoder.config.get_text_config(decoder=True)
    check_positions(config, tokens, "--tokens")
    for case in rows:
        case.rnn(decoder)  # refuses a row that cannot be computed, before the work starts
    note(f"looking for {tokens:,} tokens in each of {len(texts):,} texts")
    choice = Choice(tokens, books, chunks_per_book=1, seed=seed, first=True, length_name="tokens")
    data = choose(texts, tokenizer, choice)
    note(data.summary())
    if window <= data.given:
        raise UsageError(
            f"--window {window}: the first {data.given} tokens are given and not predicted; use a larger window"
        )
    source = {"model": options.model_name, "text": text.resolve().name if text else PG19, "seed": seed}
    course = Course(tokens, data.given, window, leg)
    evaluation = Extrapolation(decoder, data, course, store, batch, {**source, **environment(decoder.device)})
    results, others = computed(evaluation, rows, options, lambda case: f"{case.label} {case.size}")
    report = Report({**results, **others}, course)
    sizes = sorted({case.size for case in report.cases if case.size is not None})
    sized = f"size {', '.join(map(str, sizes))}" if sizes else "unbounded"
    title = f"{source['model']}, {source['text']}, {tokens:,} tokens of {len(data.chunks):,} texts, {sized}"
    tables = report.tables(title)
    show_tables(tables)
    trained = getattr(config, "max_position_embeddings", None)
    facts = {"texts": data.summary(), **evaluation.key, **evaluation.metadata}
    write_report(out, tables[0], report.markdown(title, facts), lambda: figure(report, out, title, trained))


def check_counts(tokens: int, window: int, leg: int, **counts: int | None) -> None:
    for name, value in {"tokens": tokens, "window": window, "leg": leg, **counts}.items():
        least = 2 if name == "tokens" else 1
        if value is not None and value < least:
            raise UsageError(f"--{name} {value}: must be {least} or more")
    if leg % window:
        raise UsageError(f"--leg {leg}: must be a multiple of --window {window}, such as {-(-leg // window) * window}")
