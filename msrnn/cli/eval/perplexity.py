from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.eval.common import (
    TOVA,
    Against,
    Anew,
    Batch,
    Books,
    Length,
    Seed,
    Text,
    check_counts,
    check_positions,
    compared,
    quiet,
)
from msrnn.cli.eval.terminal import show, watched
from msrnn.cli.options import SMALL, Device, Dtype, Model
from msrnn.cli.results import SkipDamaged, drawn, open_store, shown_as_well, stoppable, written
from msrnn.cli.terminal import note
from msrnn.errors import UsageError
from msrnn.policy import FULL

if TYPE_CHECKING:
    from msrnn.evaluation.cells import Grid
    from msrnn.evaluation.perplexity.report import Report

SIZES = (512,)
POLICIES = (TOVA, "window+4", FULL)

Policies = Annotated[
    list[str] | None,
    Option("--policy", help="A row: a policy, full or baseline; repeat for more.", show_default=", ".join(POLICIES)),
]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="A column: states that each layer may hold; repeat for more.", show_default="512"),
]
Paper = Annotated[bool, Option("--paper", help="All ten rows and seven sizes of the paper's table.")]
ChunksPerBook = Annotated[int, Option(help="Chunks to take of each text, at most.")]
Out = Annotated[Path, Option(help="Write perplexity.jsonl, .md, .csv, .png and .svg here.")]


def perplexity(
    text: Text = None,
    policy: Policies = None,
    size: Sizes = None,
    paper: Paper = False,
    length: Length = 4096,
    books: Books = None,
    chunks_per_book: ChunksPerBook = 4,
    seed: Seed = 0,
    batch: Batch = None,
    against: Against = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = None,
    out: Out = Path("results/perplexity"),
    force: Anew = False,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Perplexity on chunks of text for each policy and size, beside the unbounded model.

    Each chunk is read from an empty state, and every token but the given first one is predicted, with exact eviction at
    every token. Policy baseline is the unbounded model on pieces of the size's length, the model's first token in front
    of each; it predicts the same tokens. A size of a chunk's length is the unbounded model itself. Intervals are 95 %,
    by bootstrap over the chunks. What the folder has of the same model, chunk, policy, size and dtype is not computed
    again, so a run that was stopped goes on; the tables show all that it has of the same model, dtype and chunks.

    Examples:
        msrnn eval perplexity --text book.txt --length 1024 --size 64 --size 256
        msrnn eval perplexity --books 10 --policy tova --policy h2o --policy full
        msrnn eval perplexity --paper --model meta-llama/Llama-2-7b-hf --chunks-per-book 1000
    """
    table = asked(policy, size, paper, length)
    other = compared(against, table.policies)
    check_counts(length=length, books=books, chunks_per_book=chunks_per_book, batch=batch)
    from msrnn.evaluation.chunks import Choice, choose
    from msrnn.evaluation.perplexity.report import Report
    from msrnn.evaluation.perplexity.run import CHECK, Run
    from msrnn.evaluation.setting import setting
    from msrnn.evaluation.texts import PG19, documents
    from msrnn.hf.loading import check_dtype, device_named, load

    device_named(device)
    check_dtype(dtype)
    quiet()
    found = documents(text)
    store = open_store(out, "perplexity", CHECK, force=force, skip_damaged=skip_damaged)
    decoder, tokenizer = load(model, device, dtype, on_convert=note)
    check_positions(decoder.config.get_text_config(decoder=True), length)
    note(f"cutting {min(books or len(found), len(found)):,} of {len(found):,} texts into chunks of {length:,} tokens")
    data = choose(found, tokenizer, Choice(length, books, chunks_per_book, seed))
    note(data.told())
    told = {"model": model or SMALL, "text": text.resolve().name if text else PG19, "seed": seed}
    run = Run(decoder, data, store, batch, {**told, **setting(decoder.device)})
    with stoppable(force):
        asked_for = watched(run, table.cells)
    others = run.others(table.cells)
    shown_as_well([cell.label for cell in others], len(store.rows) - len(store.matching(run.key)))
    report = Report(table.beside(list(others)), {**asked_for, **others}, data.predicted, other)
    title = f"{told['model']}, {told['text']}, {len(data.chunks):,} chunks of {length:,} tokens"
    show(report, title)
    first = tokenizer.decode(data.opening) if data.opening else "none"
    write(report, out, title, {"chunks": data.told(), "first token": first, **run.key, **run.beside})


def asked(policies: list[str] | None, sizes: list[int] | None, paper: bool, length: int) -> Grid:
    from msrnn.evaluation.perplexity.cells import PAPER_ROWS, PAPER_SIZES, grid

    if not paper:
        return grid(policies or POLICIES, sizes or SIZES, length)
    if policies or sizes:
        raise UsageError("--paper: it has rows and sizes of its own; give this, or --policy and --size")
    return grid([*PAPER_ROWS, FULL], PAPER_SIZES, length)


def write(report: Report, folder: Path, title: str, told: dict[str, Any]) -> None:
    from msrnn.evaluation.perplexity.figure import figure
    from msrnn.evaluation.perplexity.report import as_csv, markdown

    texts = {name: str(value) for name, value in told.items()}
    (folder / "perplexity.md").write_text(markdown(report, title, texts))
    (folder / "perplexity.csv").write_text(as_csv(report))
    written(folder, "perplexity", ("jsonl", "md", "csv", *drawn(lambda: figure(report, folder, title))))
