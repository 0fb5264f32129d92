from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.evaluation import evaluate_model, load_texts
from msrnn.cli.evaluation_checks import check_counts, check_length
from msrnn.cli.evaluation_options import Batch, Books, ChunksPerBook, EvaluationOptions, Length, Seed, Text
from msrnn.cli.results_folder import report
from msrnn.cli.terminal import note
from msrnn.evaluation.data.texts import check_source

SIZES, MEANS = (32, 64, 128, 256, 512, 1024, 2048), (128, 256, 512)

PolicyName = Annotated[str, Option("--policy", help="The policy whose layers are measured.")]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="A size that each layer is measured at; repeat for more.", show_default="32, 64, … 2048"),
]
Means = Annotated[
    list[int] | None,
    Option("--mean", help="A mean size that is divided in the table; repeat.", show_default="128, 256, 512"),
]
Out = Annotated[Path, Option(help="Write budget.json, and budget.jsonl, .md, .csv, .png and .svg here.")]


def budget(
    *,
    text: Text = None,
    policy: PolicyName = "echo",
    size: Sizes = None,
    mean: Means = None,
    length: Length = 4096,
    books: Books = None,
    chunks_per_book: ChunksPerBook = 1,
    seed: Seed = 0,
    batch: Batch = None,
    out: Out = Path("results/budget"),
    options: EvaluationOptions,
) -> None:
    """Measure which layers need many KV rows and which few, and write a budget that divides a mean size among them.

    Each layer alone is bounded to each of the sizes, while all others keep everything; what that costs is the layer's
    curve. The written file is a budget: it gives rows, some at a time, to the layer where they gain most, so that
    `--policy echo:results/budget/budget.json --size 512` has 512 rows per layer on average. Measure on other texts than
    those you evaluate on, and compare with equal sizes and `echo:upper`: not every model gains. Results that the folder
    has are not computed again, so an interrupted run resumes.

    Examples:
        msrnn budget --text books/ --books 8
        msrnn budget --text book.txt --length 1024 --size 32 --size 512 --mean 64
        msrnn eval perplexity --policy echo:results/budget/budget.json
    """
    check_source(text)
    check_length(length)
    check_counts(books=books, chunks_per_book=chunks_per_book, batch=batch)
    sizes = sorted(set(size)) if size else [one for one in SIZES if one < length]
    means = sorted(set(mean)) if mean else [one for one in MEANS if sizes and sizes[0] <= one <= sizes[-1]]
    from msrnn import evaluation
    from msrnn.evaluation.api.layer_budget import check_budget
    from msrnn.evaluation.tasks.layer_losses import CHECK, NAME

    check_budget(policy, sizes, means, length)
    loaded, texts = load_texts(options, out, NAME, CHECK, text)
    run = partial(
        evaluation.layer_budget,
        texts=texts,
        policy=policy,
        sizes=sizes,
        means=means,
        length=length,
        books=books,
        chunks_per_book=chunks_per_book,
        seed=seed,
        batch=batch,
    )
    result = evaluate_model(options, loaded, run)
    result.report.write(out / "budget.json", result.facts)
    report(result, out)
    note(f"use it as --policy {result.report.policy}:{out / 'budget.json'}")
