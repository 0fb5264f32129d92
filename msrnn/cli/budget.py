from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.evaluation import (
    Batch,
    Books,
    ChunksPerBook,
    EvaluationOptions,
    Length,
    Seed,
    Text,
    check_counts,
    computed,
    load_chunks,
    show_tables,
    write_report,
)
from msrnn.cli.terminal import note
from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import check_source
from msrnn.policy import FULL
from msrnn.size import parse_policy, resolve

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
    """Measure which layers need many rows and which few, and write a budget that divides a mean size among them.

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
    sizes, means = sorted(set(size or SIZES)), sorted(set(mean or MEANS))
    check_counts(length=length, books=books, chunks_per_book=chunks_per_book, batch=batch)
    value, given = parse_policy(policy)
    if not value.evicts:
        raise UsageError("--policy full: evicts nothing; measure a policy that does")
    if given is not None:
        raise UsageError(f"--policy {policy}: has a budget already; measure the policy without it")
    sizes = [one for one in sizes if one < length] if size is None else sizes
    means = [one for one in means if sizes and sizes[0] <= one <= sizes[-1]] if mean is None else means
    for one in sizes:
        resolve(value, one)
    if len(sizes) < 2 or sizes[-1] >= length:
        raise UsageError(f"--size {sizes}: must be two sizes or more, smaller than the {length} tokens of a chunk")
    for one in means:
        if not sizes[0] <= one <= sizes[-1]:
            raise UsageError(f"--mean {one}: must be from {sizes[0]} to {sizes[-1]}, the sizes that are measured")
    from msrnn.evaluation.data.texts import Choice
    from msrnn.evaluation.environment import environment
    from msrnn.evaluation.tasks.layer_losses import CHECK, NAME, Case, LayerLosses, Report, figure
    from msrnn.hf.rnn import MultiStateRNN

    choice = Choice(length, books, chunks_per_book, seed)
    store, decoder, _, data, source = load_chunks(options, out, NAME, CHECK, text, choice)
    layers = MultiStateRNN(decoder, FULL, None).spec.divided
    evaluation = LayerLosses(decoder, data, store, batch, {**source, **environment(decoder.device)})
    cells = [Case(FULL.name), *(Case(value.name, layer, one) for layer in layers for one in sizes)]
    results, _ = computed(evaluation, cells, options)
    report = Report(value.name, layers, sizes, results, data.predicted, means)
    title = f"{source['model']}, {value.name}, {source['text']}, {len(data.chunks):,} chunks of {length:,} tokens"
    tables = report.tables(title)
    show_tables(tables)
    facts = {"chunks": data.summary(), **evaluation.key, **evaluation.metadata}
    report.write(out / "budget.json", facts)
    write_report(out, tables[0], report.markdown(title, facts), lambda: figure(report, out, title))
    note(f"use it as --policy {value.name}:{out / 'budget.json'}")
