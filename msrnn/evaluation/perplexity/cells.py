"""The table of the paper, and which others can be computed. Every cell predicts the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

from msrnn.errors import UsageError
from msrnn.evaluation.cells import BASELINE, Grid, table
from msrnn.policy import resolve

PAPER_ROWS = (
    BASELINE,
    "window",
    "window+1",
    "window+4",
    "h2o",
    "h2o-layer",
    "tova-head",
    "tova",
    "tova+1",
    "tova+4",
)
PAPER_SIZES = tuple(2**i for i in range(6, 13))


def grid(policies: Sequence[str], sizes: Sequence[int], length: int) -> Grid:
    """A table that can be computed; refuses what cannot."""
    for name in policies:
        for size in sizes:
            _check(name, size)
    return table(policies, sizes, length)


def _check(name: str, size: int) -> None:
    if name != BASELINE:
        resolve(name, size)
    elif size < 2:
        raise UsageError(f"--size {size}: a piece of the baseline must have 2 tokens or more, to predict one")
