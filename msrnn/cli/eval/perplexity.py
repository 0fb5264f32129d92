from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.eval.terminal import show, watched
from msrnn.cli.options import SMALL, Device, Dtype, Model
from msrnn.cli.results import rows_file
from msrnn.cli.terminal import note
from msrnn.policy import FULL

if TYPE_CHECKING:
    from msrnn.evaluate.cells import Grid
    from msrnn.evaluate.perplexity.report import Report

TOVA, SIZES = "tova", (512,)
POLICIES = (TOVA, "window+4", FULL)

Text = Annotated[
    Path | None,
    Option(
        help="A folder of .txt files, one .txt file, .jsonl lines with a text, or .npy files of token ids.",
        show_default="PG-19's test set",
    ),
]
Policies = Annotated[
    list[str] | None,
    Option("--policy", help="A row: a policy, full or baseline; repeat for more.", show_default=", ".join(POLICIES)),
]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="A column: states that each layer may hold; repeat for more.", show_default="512"),
]
Paper = Annotated[bool, Option("--paper", help="All ten rows and seven sizes of the paper's table.")]
Length = Annotated[int, Option(help="Tokens of a chunk, with the model's first token where it has one.")]
Books = Annotated[int | None, Option(help="Texts to take chunks of.", show_default="all")]
ChunksPerBook = Annotated[int, Option(help="Chunks to take of each text, at most.")]
Seed = Annotated[int, Option(help="Decides which texts and which chunks.")]
Batch = Annotated[int | None, Option(help="Chunks read at once.", show_default="1 on cpu, 64 or what fits on cuda")]
Against = Annotated[
    str | None, Option(help="The policy that the others are compared with.", show_default="tova, or the first")
]
Out = Annotated[Path, Option(help="Write perplexity.jsonl, .md, .csv, .png and .svg here.")]
Anew = Annotated[bool, Option("--force", help="Compute anew what the folder already has, of any model.")]


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
) -> None:
    """Perplexity on chunks of text for each policy and size, beside the unbounded model.

    Each chunk is read from an empty state, and every token but the given first one is predicted, with exact eviction at
    every token. Policy baseline is the unbounded model on pieces of the size's length, the model's first token in front
    of each; it predicts the same tokens. A size of a chunk's length is the unbounded model itself. Intervals are 95 %,
    by bootstrap over the chunks. What the folder has of the same model, chunk, policy, size and dtype is not computed
    again, so a run that was stopped goes on.

    Examples:
        msrnn eval perplexity --text book.txt --length 1024 --size 64 --size 256
        msrnn eval perplexity --books 10 --policy tova --policy h2o --policy full
        msrnn eval perplexity --paper --model meta-llama/Llama-2-7b-hf --chunks-per-book 1000
    """
    table = asked(policy, size, paper, length)
    other = compared(against, table.policies)
    check_counts(length=length, books=books, chunks_per_book=chunks_per_book, batch=batch)
    from msrnn.evaluate.chunks import Choice, choose
    from msrnn.evaluate.perplexity.report import Report
    from msrnn.evaluate.perplexity.run import Run
    from msrnn.evaluate.setting import setting
    from msrnn.evaluate.store import Store
    from msrnn.evaluate.texts import PG19, documents
    from msrnn.models import check_dtype, device_named, load

    device_named(device)
    check_dtype(dtype)
    quiet()
    found = documents(text)
    store = Store(rows_file(out, "perplexity", force))
    decoder, tokenizer = load(model, device, dtype, on_convert=note)
    check_positions(decoder.config.get_text_config(decoder=True), length)
    note(f"cutting {min(books or len(found), len(found)):,} of {len(found):,} texts into chunks of {length:,} tokens")
    data = choose(found, tokenizer, Choice(length, books, chunks_per_book, seed))
    note(data.told())
    told = {"model": model or SMALL, "text": text.resolve().name if text else PG19, "seed": seed}
    run = Run(decoder, data, store, batch, {**told, **setting(decoder.device)})
    report = Report(table, watched(run, table.cells), data.predicted, other)
    title = f"{told['model']}, {told['text']}, {len(data.chunks):,} chunks of {length:,} tokens"
    show(report, title)
    first = tokenizer.decode(data.opening) if data.opening else "none"
    write(report, out, title, {"chunks": data.told(), "first token": first, **run.key, **run.beside})


def asked(policies: list[str] | None, sizes: list[int] | None, paper: bool, length: int) -> Grid:
    from msrnn.evaluate.perplexity.cells import PAPER_ROWS, PAPER_SIZES, grid

    if not paper:
        return grid(policies or POLICIES, sizes or SIZES, length)
    if policies or sizes:
        raise ValueError("--paper: it has rows and sizes of its own; give this, or --policy and --size")
    return grid([*PAPER_ROWS, FULL], PAPER_SIZES, length)


def compared(against: str | None, policies: Sequence[str]) -> str:
    if against is None:
        return TOVA if TOVA in policies else policies[0]
    if against not in policies:
        raise ValueError(f"--against {against}: not among the rows {', '.join(policies)}; add --policy {against}")
    return against


def check_counts(length: int, **counts: int | None) -> None:
    if length < 2:
        raise ValueError(f"--length {length}: must be 2 or more, since the first token is given")
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be 1 or more")


def quiet() -> None:
    """No remarks of others: on texts longer than a model, or each time that the network is tried again."""
    import huggingface_hub
    import transformers

    loggers: tuple[Any, Any] = transformers.logging, huggingface_hub.logging
    for logger in loggers:
        logger.set_verbosity_error()


def check_positions(config: Any, length: int, option: str = "--length") -> None:
    """Positions that are learned end; those that are rotated go on, past what the model was trained for."""
    known = getattr(config, "max_position_embeddings", None)
    if not known or length <= known:
        return
    if not getattr(config, "rope_parameters", None):
        raise ValueError(f"{option} {length}: this model knows {known:,} positions; take fewer tokens")
    note(f"{length:,} tokens are more than the {known:,} that this model was made for")


def write(report: Report, folder: Path, title: str, told: dict[str, Any]) -> None:
    from msrnn.evaluate.perplexity.figure import figure
    from msrnn.evaluate.perplexity.report import as_csv, markdown

    texts = {name: str(value) for name, value in told.items()}
    (folder / "perplexity.md").write_text(markdown(report, title, texts))
    (folder / "perplexity.csv").write_text(as_csv(report))
    figure(report, folder, title)
    note(f"written to {folder}: " + ", ".join(f"perplexity.{kind}" for kind in ("jsonl", "md", "csv", "png", "svg")))
