"""Means over texts with 95 % confidence intervals, and paired differences on the same texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from msrnn.errors import UsageError

RESAMPLES, LEVEL, SEED = 2000, 0.95, 0


class Estimate(NamedTuple):
    """A value and its 95 % confidence interval; both ends are None with fewer than two texts."""

    value: float
    low: float | None = None
    high: float | None = None

    def exp(self) -> Estimate:
        """The perplexity of a mean loss; the ratio of perplexities of a difference of losses."""
        return Estimate(*(None if x is None else float(numpy.exp(x)) for x in self))  # type: ignore[arg-type]


Statistic = Callable[[list[Any]], Any]  # of the sum of each column: numbers, or arrays with one for each resample


def bootstrap(columns: Sequence[Sequence[float]], statistic: Statistic, seed: int = SEED) -> Estimate:
    """A statistic of texts, each of which has a number in every column.

    The interval is that of the percentile bootstrap: texts are resampled with replacement, 2,000 times.
    """
    values = [numpy.asarray(column, dtype=float) for column in columns]
    value, count = float(statistic([column.sum() for column in values])), len(values[0])
    if count < 2:
        return Estimate(value)
    drawn = numpy.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    resampled = statistic([column[drawn].sum(1) for column in values])
    low, high = numpy.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))


def mean(sums: Sequence[float], counts: Sequence[int], seed: int = SEED) -> Estimate:
    """The mean over all tokens, from the sum and the count of each text."""
    if not len(sums) == len(counts) > 0:
        raise UsageError(f"{len(sums)} sums of {len(counts)} texts: give one sum for each text, and at least one")
    return bootstrap([sums, counts], lambda columns: columns[0] / columns[1], seed)


def perplexity(sums: Sequence[float], counts: Sequence[int], seed: int = SEED) -> Estimate:
    """The perplexity over all tokens; every token has the same weight."""
    return mean(sums, counts, seed).exp()


def difference(sums: Sequence[float], others: Sequence[float], counts: Sequence[int], seed: int = SEED) -> Estimate:
    """The paired difference of losses per token; `exp()` is the ratio of perplexities."""
    return mean([a - b for a, b in zip(sums, others, strict=True)], counts, seed)
