"""What the verbs that evaluate have in common: their options, and what is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from msrnn.cli.terminal import note
from msrnn.errors import UsageError
from msrnn.evaluation.cells import table

TOVA = "tova"

Text = Annotated[
    Path | None,
    Option(
        help="A folder of .txt files, one .txt file, .jsonl lines with a text, or .npy files of token ids.",
        show_default="PG-19's test set",
    ),
]
Length = Annotated[int, Option(help="Tokens of a chunk, with the model's first token where it has one.")]
Books = Annotated[int | None, Option(help="Texts to take chunks of.", show_default="all")]
Seed = Annotated[int, Option(help="Decides which texts and which chunks.")]
Batch = Annotated[int | None, Option(help="Chunks read at once.", show_default="1 on cpu, 64 or what fits on cuda")]
Against = Annotated[
    str | None, Option(help="The policy that the others are compared with.", show_default="tova, or the first")
]
Anew = Annotated[
    bool, Option("--force", help="Compute what is asked for again, though the folder has it; other rows stay.")
]
MOST = 2**16  # more at once fit into no memory


def compared(against: str | None, policies: Sequence[str]) -> str:
    if against is None:
        return TOVA if TOVA in policies else policies[0]
    (name,) = table([against], sizes=(), length=0).policies  # as rows are named
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
        if value is not None and not 1 <= value <= MOST:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be from 1 to {MOST:,}")


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
        raise UsageError(f"{option} {length}: this model knows {known:,} positions; take fewer tokens")
    note(f"{length:,} tokens are more than the {known:,} that this model was made for")
