from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.evaluation import evaluate_model, load_texts
from msrnn.cli.evaluation_checks import check_batch, check_counts
from msrnn.cli.evaluation_options import Books, EvaluationOptions, Text
from msrnn.cli.options import LayerSize
from msrnn.cli.results_folder import report
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
    check_counts(books=books)
    check_batch(batch=batch)
    from msrnn import evaluation
    from msrnn.evaluation.api.extrapolation import check_course, extrapolation_cases
    from msrnn.evaluation.tasks.extrapolation import CHECK

    check_course(tokens, window, leg)
    extrapolation_cases(row, size)
    loaded, texts = load_texts(options, out, NAME, CHECK, text)
    run = partial(
        evaluation.extrapolation,
        texts=texts,
        rows=row,
        size=size,
        tokens=tokens,
        window=window,
        leg=leg,
        books=books,
        seed=seed,
        batch=batch,
    )
    report(evaluate_model(options, loaded, run), out)
