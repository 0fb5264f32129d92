"""Means over texts, how sure they are, and differences between two that read the same texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from msrnn.errors import UsageError

RESAMPLES, LEVEL, SEED = 2000, 0.95, 0


class Estimate(NamedTuple):
    """A value and its interval; both ends are None where fewer than two texts cannot tell."""

    value: float
    low: float | None = None
    high: float | None = None

    def exp(self) -> Estimate:
        """Of a mean loss: the perplexity. Of a difference: the ratio of perplexities."""
        return Estimate(*(None if x is None else float(numpy.exp(x)) for x in self))  # type: ignore[arg-type]


Statistic = Callable[[list[Any]], Any]  # of the columns' sums over texts, numbers or arrays of them alike


def bootstrap(columns: Sequence[Sequence[float]], statistic: Statistic, seed: int = SEED) -> Estimate:
    """What a statistic makes of texts that each have a number in every column.

    The interval is the percentile bootstrap's, 95 %: texts are drawn anew with replacement, 2,000 times.
    """
    values = [numpy.asarray(column, dtype=float) for column in columns]
    value, count = float(statistic([column.sum() for column in values])), len(values[0])
    if count < 2:
        return Estimate(value)
    drawn = numpy.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    found = statistic([column[drawn].sum(1) for column in values])
    low, high = numpy.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))


def mean(sums: Sequence[float], counts: Sequence[int], seed: int = SEED) -> Estimate:
    """The mean over all tokens of texts, given each one's sum and count."""
    if not len(sums) == len(counts) > 0:
        raise UsageError(f"{len(sums)} sums of {len(counts)} texts: must be as many, 1 or more")
    return bootstrap([sums, counts], lambda columns: columns[0] / columns[1], seed)


def perplexity(sums: Sequence[float], counts: Sequence[int], seed: int = SEED) -> Estimate:
    """Every token counts the same, whichever text it is in."""
    return mean(sums, counts, seed).exp()


def difference(sums: Sequence[float], others: Sequence[float], counts: Sequence[int], seed: int = SEED) -> Estimate:
    """How much more the first lose per token than the others, text by text; `exp()` is the perplexities' ratio."""
    return mean([a - b for a, b in zip(sums, others, strict=True)], counts, seed)
