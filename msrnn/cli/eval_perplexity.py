from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn.cli.evaluation import evaluate_model, load_texts
from msrnn.cli.evaluation_checks import check_against, check_counts, check_length
from msrnn.cli.evaluation_options import Against, Batch, Books, ChunksPerBook, EvaluationOptions, Length, Seed, Text
from msrnn.cli.recall_options import RecallOptions
from msrnn.cli.results_folder import report
from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import check_source
from msrnn.policy import FULL

if TYPE_CHECKING:
    from msrnn.evaluation.cells import Grid

SIZES = (512,)
POLICIES = ("tova", "window+4", FULL.name)

Policies = Annotated[
    list[str] | None,
    Option(
        "--policy",
        help="A row of the table: a policy, full, baseline or future; repeat for more.",
        show_default=", ".join(POLICIES),
    ),
]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="A column of the table: KV rows per layer; repeat for more.", show_default="512"),
]
Paper = Annotated[bool, Option("--paper", help="All ten rows and seven sizes of the paper's table.")]
Out = Annotated[Path, Option(help="Write perplexity.jsonl, .md, .csv, .png and .svg here.")]


def perplexity(
    *,
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
    out: Out = Path("results/perplexity"),
    recalling: RecallOptions,
    options: EvaluationOptions,
) -> None:
    """Perplexity on chunks of text for each policy and size, and of the full model.

    Each chunk is read from an empty state, with exact eviction at every token, and every token after the given first
    one is predicted. Policy baseline is the full model on pieces of `size` tokens, each with the model's first token in
    front; it predicts the same tokens. Policy future bounds each layer to `size` KV rows and evicts the one that the
    next 256 tokens would miss least: a bound on what a policy could know. Its memory grows with the square of the
    length. With a size of at least the chunk's length nothing is evicted: that is the full model. Intervals are 95 %,
    by bootstrap over the chunks. Results that the folder has of the same model, chunk, policy, size and dtype are not
    computed again, so an interrupted run resumes. The tables show all results of the same model, dtype and chunks.

    With --recall, the bounded policies archive every token and predict each one with the KV rows that it recalls. These
    are rows of their own, as "echo + 256 recalled", next to those without recall.

    Examples:
        msrnn eval perplexity --text book.txt --length 1024 --size 64 --size 256
        msrnn eval perplexity --books 10 --policy tova --policy h2o --policy full
        msrnn eval perplexity --text book.txt --length 1024 --policy future
        msrnn eval perplexity --text book.txt --policy echo --recall 256 --recall-every 16
        msrnn eval perplexity --paper --model meta-llama/Llama-2-7b-hf --chunks-per-book 1000
    """
    check_source(text)
    recalling = recalling.of_texts
    grid = choose_cells(policy, size, paper, length, recalling)
    reference = check_against(recalling.add_to([against])[0] if against else None, grid.policies)
    check_length(length)
    check_counts(books=books, chunks_per_book=chunks_per_book, batch=batch)
    from msrnn import evaluation
    from msrnn.evaluation.tasks.perplexity import CHECK, NAME

    loaded, texts = load_texts(options, out, NAME, CHECK, text)
    run = partial(
        evaluation.perplexity,
        texts=texts,
        policies=grid.policies,
        sizes=grid.sizes,
        length=length,
        books=books,
        chunks_per_book=chunks_per_book,
        seed=seed,
        batch=batch,
        against=reference,
    )
    report(evaluate_model(options, loaded, run), out)


def choose_cells(
    policies: list[str] | None, sizes: list[int] | None, paper: bool, length: int, recalling: RecallOptions
) -> Grid:
    """The rows and columns of the table."""
    from msrnn.evaluation.tasks.perplexity import PAPER_ROWS, PAPER_SIZES, grid

    if not paper:
        return grid(recalling.add_to(policies or POLICIES), sizes or SIZES, length)
    if policies or sizes:
        raise UsageError("--paper: sets the rows and sizes; leave out --paper, or --policy and --size")
    return grid(recalling.add_to([*PAPER_ROWS, FULL.name]), PAPER_SIZES, length)
