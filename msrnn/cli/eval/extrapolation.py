from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.eval.common import Anew, Books, Text, check_batch, check_positions, quiet
from msrnn.cli.eval.terminal import watched
from msrnn.cli.options import SMALL, Device, Dtype, Model, Size
from msrnn.cli.results import SkipDamaged, drawn, open_store, shown_as_well, stoppable, written
from msrnn.cli.terminal import note, show_table
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.evaluation.extrapolation.report import Report

NAME = "extrapolation"
ROWS = ("tova@compressed", "window+4@compact", "tova@original", "echo+1~{horizon}@compressed")
REACH = 4  # times the size is the horizon of the last one

DEFAULT = ", ".join(ROWS).format(horizon=f"({REACH} times the size)")
Rows = Annotated[
    list[str] | None,
    Option("--row", metavar="POLICY@POSITIONS", help="A row; repeat for more.", show_default=DEFAULT),
]
Tokens = Annotated[int, Option(help="Tokens to read of each text, from its first on.")]
Window = Annotated[int, Option(help="Tokens of a point of the figure.")]
Leg = Annotated[int, Option(help="Tokens after which the state is saved, to go on from.")]
Seed = Annotated[int, Option(help="Decides which texts, where there are more than --books.")]
Batch = Annotated[int | None, Option(help="Texts read at once.", show_default="1 on cpu, all on cuda")]
Out = Annotated[Path, Option(help=f"Write {NAME}.jsonl, .md, .csv, .png and .svg here.")]


def extrapolation(
    text: Text = None,
    row: Rows = None,
    size: Size = 512,
    tokens: Tokens = 70_000,
    window: Window = 1_000,
    leg: Leg = 10_000,
    books: Books = None,
    seed: Seed = 0,
    batch: Batch = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = None,
    out: Out = Path(f"results/{NAME}"),
    force: Anew = False,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Perplexity far beyond the training length, on the first tokens of every text that is long enough.

    One state goes from a text's first token to its last, with exact eviction at every token. Each point is the mean
    over all tokens so far, and also over the window before it. A row is a policy and where the tokens that it keeps
    stand: original, compact, compressed (or compressed:ln, compressed:sqrt). The state is saved beside the rows after
    each leg, so a run that was stopped goes on in the middle of a text.

    Examples:
        msrnn eval extrapolation --text books/ --tokens 20000 --books 4
        msrnn eval extrapolation --row tova@compressed --row tova@compact
        msrnn eval extrapolation --text all.txt --tokens 250000 --leg 50000
    """
    check_counts(tokens, window, leg, books=books)
    check_batch(batch=batch)
    from msrnn.evaluation.chunks import Choice, choose
    from msrnn.evaluation.extrapolation.cases import CHECK, cases
    from msrnn.evaluation.extrapolation.legs import Course
    from msrnn.evaluation.extrapolation.report import Report
    from msrnn.evaluation.extrapolation.run import Run
    from msrnn.evaluation.setting import setting
    from msrnn.evaluation.texts import PG19, documents
    from msrnn.hf.loading import check_dtype, device_named, load

    asked = cases(row or [name.format(horizon=REACH * size) for name in ROWS], size)
    device_named(device)
    check_dtype(dtype)
    quiet()
    found = documents(text)
    store = open_store(out, NAME, CHECK, force=force, skip_damaged=skip_damaged)
    decoder, tokenizer = load(model, device, dtype, on_convert=note)
    config = decoder.config.get_text_config(decoder=True)
    check_positions(config, tokens, "--tokens")
    for case in asked:
        case.rnn(decoder)  # refuses what cannot be computed before anything is
    note(f"looking for {tokens:,} tokens in each of {len(found):,} texts")
    data = choose(found, tokenizer, Choice(tokens, books, chunks_per_book=1, seed=seed, first=True, option="--tokens"))
    note(data.told())
    if window <= data.given:
        raise UsageError(f"--window {window}: the first {data.given} are given, so that it predicts nothing")
    batch = batch or (len(data.chunks) if decoder.device.type == "cuda" else 1)
    told = {"model": model or SMALL, "text": text.resolve().name if text else PG19, "seed": seed, "batch": batch}
    course = Course(tokens, data.given, window, leg)
    run = Run(decoder, data, course, store, batch, {**told, **setting(decoder.device)})
    with stoppable(force):
        results = watched(run, asked)
    others = run.others(asked)
    shown_as_well([f"{case.label} {case.size}" for case in others], len(store.rows) - len(store.matching(run.key)))
    report = Report({**results, **others}, course)
    sizes = sorted({case.size for case in report.cases if case.size is not None})
    named = f"size {', '.join(map(str, sizes))}" if sizes else "unbounded"
    title = f"{told['model']}, {told['text']}, {tokens:,} tokens of {len(data.chunks):,} texts, {named}"
    show(report, title)
    trained = getattr(config, "max_position_embeddings", None)
    write(report, out, title, trained, {"texts": data.told(), **run.key, **run.beside})


def check_counts(tokens: int, window: int, leg: int, **counts: int | None) -> None:
    for name, value in {"tokens": tokens, "window": window, "leg": leg, **counts}.items():
        least = 2 if name == "tokens" else 1
        if value is not None and value < least:
            raise UsageError(f"--{name} {value}: must be {least} or more")
    if leg % window:
        raise UsageError(f"--leg {leg}: must be whole windows of {window} tokens, as {-(-leg // window) * window} is")


def show(report: Report, title: str) -> None:
    from msrnn.evaluation.extrapolation.report import headers

    show_table(f"perplexity of all tokens so far: {title}", headers(report), report.table(report.so_far))
    show_table(
        f"perplexity of the last {report.course.window:,} tokens alone", headers(report), report.table(report.windows)
    )


def write(report: Report, folder: Path, title: str, trained: int | None, told: dict[str, Any]) -> None:
    from msrnn.evaluation.extrapolation.figure import figure
    from msrnn.evaluation.extrapolation.report import as_csv, markdown

    texts = {name: str(value) for name, value in told.items()}
    (folder / f"{NAME}.md").write_text(markdown(report, title, texts))
    (folder / f"{NAME}.csv").write_text(as_csv(report))
    written(folder, NAME, ("jsonl", "md", "csv", *drawn(lambda: figure(report, folder, title, trained))))
