"""Code that evaluation commands share: options, checks before the computation, and progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Option

from msrnn.cli.results import note_other_rows, resumed, stoppable
from msrnn.cli.terminal import note, progress
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.evaluation.runner import Evaluation, Progress

T = TypeVar("T")
TOVA = "tova"

Text = Annotated[
    Path | None,
    Option(
        help="A folder of .txt files, one .txt file, .jsonl lines with a text, or .npy files of token ids.",
        show_default="PG-19's test set",
    ),
]
Length = Annotated[
    int, Option(help="Tokens of a chunk, including the token that opens a text, if the tokenizer adds one.")
]
Books = Annotated[int | None, Option(help="Number of texts to take chunks from.", show_default="all")]
Seed = Annotated[int, Option(help="Random seed that selects texts and chunks.")]
Batch = Annotated[int | None, Option(help="Chunks read at once.", show_default="1 on cpu, 64 or what fits on cuda")]
Against = Annotated[
    str | None, Option(help="The policy that the others are compared with.", show_default="tova, or the first")
]
Recompute = Annotated[
    bool, Option("--force", help="Compute these results again, even if the folder has them; its other rows are kept.")
]
MAX_BATCH = 2**16  # more fit into no memory


def compared(against: str | None, policies: Sequence[str]) -> str:
    """The row that the others are compared with."""
    from msrnn.evaluation.cells import row_name

    if against is None:
        return TOVA if TOVA in policies else policies[0]
    name = row_name(against)
    if name not in policies:
        raise UsageError(f"--against {against}: not among the rows {', '.join(policies)}; add --policy {against}")
    return name


def check_counts(length: int, **counts: int | None) -> None:
    if length < 2:
        raise UsageError(f"--length {length}: must be 2 or more, since the first token is given")
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    check_batch(batch=counts.get("batch"))


def check_batch(**batches: int | None) -> None:
    for name, value in batches.items():
        if value is not None and not 1 <= value <= MAX_BATCH:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be from 1 to {MAX_BATCH:,}")


def quiet() -> None:
    """Silence warnings of transformers about long texts, and of the hub about retries."""
    import huggingface_hub
    import transformers

    loggers: tuple[Any, Any] = transformers.logging, huggingface_hub.logging
    for logger in loggers:
        logger.set_verbosity_error()


def check_positions(config: Any, length: int, option: str = "--length") -> None:
    """Refuse more tokens than a model has learned positions; with RoPE, only print a note."""
    known = getattr(config, "max_position_embeddings", None)
    if not known or length <= known:
        return
    if not getattr(config, "rope_parameters", None):
        raise UsageError(f"{option} {length}: this model has {known:,} positions; use fewer tokens")
    note(f"{length:,} tokens are more than the {known:,} that this model was trained for")


def watched(run: Callable[[list[Any], Progress], T], cells: list[Any]) -> T:
    """Run an evaluation with a bar that counts the tokens that are left, and names the cell."""
    from msrnn.evaluation.runner import Progress

    with progress() as bar:
        task = bar.add_task("", total=None)

        def on_cell(cell: Any) -> None:
            label = f"{cell.label} ({cells.index(cell) + 1} of {len(cells)})" if cell in cells else cell.label
            bar.update(task, description=label)
            if bar.disable:
                note(label)

        def on_total(tokens: int) -> None:
            bar.update(task, total=tokens)
            if not tokens:
                note("nothing left to compute")

        return run(cells, Progress(on_total, on_cell, partial(bar.advance, task), resumed))


def computed(
    evaluation: Evaluation[Any, Any, T], cells: list[Any], force: bool, label: Callable[[Any], str] = lambda x: x.label
) -> tuple[dict[Any, list[T]], dict[Any, list[T]]]:
    """The results of these cells, and those of other cells that the folder has; with progress and notes."""
    with stoppable(force):
        results = watched(evaluation.results, cells)
    others = evaluation.others(cells)
    note_other_rows([label(cell) for cell in others], evaluation.other_rows)
    return results, others
