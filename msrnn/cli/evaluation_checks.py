"""Checks of the options of evaluations, with messages that name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msrnn.checks import check_count
from msrnn.cli.terminal import note
from msrnn.errors import UsageError

MAX_BATCH = 2**16  # more fit into no memory


def check_against(against: str | None, policies: Sequence[str]) -> str:
    """The policy that the others are compared with."""
    from msrnn.evaluation.cells import reference_policy

    try:
        return reference_policy(against, policies)
    except UsageError as error:
        if error.name != "against":
            raise
        raise UsageError(f"--against {against}: {error.message}; add --policy {against}") from error


def check_length(length: int) -> None:
    if length < 2:
        raise UsageError(f"--length {length}: must be 2 or more, since the first token is given")


def check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)
    check_batch(batch=counts.get("batch"))


def check_batch(**batches: int | None) -> None:
    for name, value in batches.items():
        if value is not None:
            check_count(name, value, most=MAX_BATCH)


def check_positions(config: Any, length: int, option: str = "--length") -> None:
    """Refuse more tokens than a model has learned positions; with RoPE, only print a note."""
    from msrnn.evaluation.api import common

    try:
        common.check_positions(config, length, note)
    except UsageError as error:
        raise UsageError(f"{option} {length}: {error.problem}") from error
