"""What eviction times say, in closed form: no mask is ever built.

A step *sees* a token from the token's own step on, up to and with the step that drops it: j <= t <= evicted_at[j].
Everything here counts what steps see. Steps count from 0, as tokens do.
"""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import NDArray

Numbers = NDArray[Any]


def steps_kept(evicted_at: Numbers) -> Numbers:
    """[..., T] -> how many steps see each token, its own among them; one that is never dropped counts to the end."""
    length = evicted_at.shape[-1]
    kept: Numbers = numpy.minimum(evicted_at, length - 1) - numpy.arange(length) + 1
    return kept


def window(length: int, size: int) -> Numbers:
    """[T]: the eviction times of the policy `window`."""
    return numpy.minimum(numpy.arange(length) + size, length)


def seen_together(one: Numbers, other: Numbers, start: int) -> Numbers:
    """[..., T] twice -> [...]: tokens that both see, summed over the steps from `start` on."""
    length = one.shape[-1]
    last = numpy.minimum(numpy.minimum(one, other), length - 1)
    first = numpy.maximum(numpy.arange(length), start)
    steps: Numbers = numpy.maximum(last - first + 1, 0).sum(-1)
    return steps


def overlap(one: Numbers, other: Numbers, start: int) -> Numbers:
    """[..., T] twice -> [...]: of what the two see, the share that both see, over the steps from `start` on.

    NaN where there is no such step.
    """
    both = seen_together(one, other, start)
    each = seen_together(one, one, start) + seen_together(other, other, start)
    shares: Numbers = numpy.divide(2.0 * both, each, out=numpy.full(both.shape, numpy.nan), where=each > 0)
    return shares


def first_choice(size: int) -> int:
    """The first step that sees what a policy chose: step `size` still sees every token, and drops the first."""
    return size + 1


def recent(evicted_at: Numbers, size: int) -> Numbers:
    """[..., T] -> [...]: of what steps see, the share that `window` of the same size sees as well."""
    return overlap(evicted_at, window(evicted_at.shape[-1], size), first_choice(size))


def over_all_steps(share: Numbers, size: int, length: int) -> Numbers:
    """The mean over all steps of a share that is 1 until a policy has chosen."""
    before = min(first_choice(size), length)
    return (before + (length - before) * share) / length if before < length else numpy.ones_like(share)


def between_rows(evicted_at: Numbers, start: int) -> Numbers:
    """[N, T] -> overlaps [N, N]"""
    return numpy.stack([overlap(row, evicted_at, start) for row in evicted_at])


def off_diagonal(square: Numbers) -> Numbers:
    """[N, N] -> [N]: each one's mean with the others; NaN where there are none."""
    count = len(square)
    if count < 2:
        return numpy.full(count, numpy.nan)
    rest: Numbers = (square.sum(-1) - square.diagonal()) / (count - 1)
    return rest


def survivors(kept: Numbers) -> tuple[Numbers, Numbers]:
    """[..., T] steps kept -> [T] twice: tokens kept for n + 1 steps or more, and those born early enough to be.

    Whom the text's end would cut off before that age is not counted for it.
    """
    length = kept.shape[-1]
    rows = kept.reshape(-1, length)
    could = len(rows) * numpy.arange(length, 0, -1)
    did = numpy.bincount(rows.ravel(), minlength=length + 1)[::-1].cumsum()[::-1][1 : length + 1]
    return did, could


def coverage(evicted_at: Numbers, pixels: int) -> Numbers:
    """[T] -> [pixels, pixels]: rows are steps, columns tokens; the share of each pixel's pairs that see each other."""
    length = len(evicted_at)
    pixels = min(pixels, length)
    edges = numpy.arange(pixels) * length // pixels
    column = numpy.searchsorted(edges, numpy.arange(length), side="right") - 1
    change = numpy.zeros((length + 1, pixels), dtype=numpy.int32)
    numpy.add.at(change, (numpy.arange(length), column), 1)
    numpy.subtract.at(change, (numpy.minimum(evicted_at, length - 1) + 1, column), 1)
    seen = numpy.add.reduceat(change.cumsum(0)[:-1], edges, axis=0)
    widths = numpy.diff(numpy.append(edges, length))
    shares: Numbers = seen / numpy.outer(widths, widths)
    return shares
