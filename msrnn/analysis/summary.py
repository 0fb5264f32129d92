"""Measures of eviction times, computed without building a mask, and their summary over all chunks.

A step *sees* a token from the token's own step to the step that evicts it, both included: j <= t <= evicted_at[j].
Everything here counts what steps see. Steps count from 0, as tokens do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from msrnn.errors import UsageError
from msrnn.hf.trace import ChunkTrace

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)

Numbers = NDArray[Any]


def steps_kept(evicted_at: Numbers) -> Numbers:
    """[..., T] -> how many steps see each token, its own included; a token that is never evicted counts to the end."""
    length = evicted_at.shape[-1]
    kept: Numbers = numpy.minimum(evicted_at, length - 1) - numpy.arange(length) + 1
    return kept


def window(length: int, size: int) -> Numbers:
    """[T]: the eviction times of policy `window`."""
    return numpy.minimum(numpy.arange(length) + size, length)


def count_seen_by_both(one: Numbers, other: Numbers, start: int) -> Numbers:
    """[..., T] twice -> [...]: tokens that both see, summed over the steps from `start` on."""
    length = one.shape[-1]
    last = numpy.minimum(numpy.minimum(one, other), length - 1)
    first = numpy.maximum(numpy.arange(length), start)
    steps: Numbers = numpy.maximum(last - first + 1, 0).sum(-1)
    return steps


def overlap(one: Numbers, other: Numbers, start: int) -> Numbers:
    """[..., T] twice -> [...]: of the tokens that the two see, the share that both see, over the steps from `start` on.

    NaN if there is no such step.
    """
    both = count_seen_by_both(one, other, start)
    each = count_seen_by_both(one, one, start) + count_seen_by_both(other, other, start)
    shares: Numbers = numpy.divide(2.0 * both, each, out=numpy.full(both.shape, numpy.nan), where=each > 0)
    return shares


def first_choice(size: int) -> int:
    """The first step that depends on the policy: step `size` still sees every token, and evicts the first."""
    return size + 1


def recent(evicted_at: Numbers, size: int) -> Numbers:
    """[..., T] -> [...]: of the tokens that steps see, the share that `window` of the same size also sees."""
    return overlap(evicted_at, window(evicted_at.shape[-1], size), first_choice(size))


def over_all_steps(share: Numbers, size: int, length: int) -> Numbers:
    """The mean over all steps of a share that is 1 at the steps before `first_choice`."""
    before = min(first_choice(size), length)
    return (before + (length - before) * share) / length if before < length else numpy.ones_like(share)


def between_rows(evicted_at: Numbers, start: int) -> Numbers:
    """[N, T] -> overlaps [N, N]"""
    return numpy.stack([overlap(row, evicted_at, start) for row in evicted_at])


def off_diagonal(square: Numbers) -> Numbers:
    """[N, N] -> [N]: the mean of each row without its diagonal; NaN for N = 1."""
    count = len(square)
    if count < 2:
        return numpy.full(count, numpy.nan)
    rest: Numbers = (square.sum(-1) - square.diagonal()) / (count - 1)
    return rest


def survivors(kept: Numbers) -> tuple[Numbers, Numbers]:
    """[..., T] steps kept -> [T] twice: tokens kept for n + 1 steps or more, and tokens that could have been.

    A token too close to the end of the text to reach that age is in neither count.
    """
    length = kept.shape[-1]
    rows = kept.reshape(-1, length)
    could = len(rows) * numpy.arange(length, 0, -1)
    did = numpy.bincount(rows.ravel(), minlength=length + 1)[::-1].cumsum()[::-1][1 : length + 1]
    return did, could


def coverage(evicted_at: Numbers, pixels: int) -> Numbers:
    """[T] -> [pixels, pixels]: rows are steps, columns tokens; the share of (step, token) pairs in a pixel that see."""
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


@dataclass(frozen=True)
class Summary:
    """One policy at one size, over N chunks of T tokens. Means are over groups and layers unless these are axes."""

    policy: str
    size: int
    layers: tuple[int, ...]
    first_trace: ChunkTrace  # of the first chunk, for the figures
    life: Numbers  # [N, T]: mean steps kept
    recent: Numbers  # [L, G]: share that `window` also sees, over the steps from `first_choice` on
    recent_at_all_steps: float
    counts: Numbers  # [T + 1]: how many KV rows (a token in a group of a layer) are kept for this number of steps
    survival: Numbers  # [T]: share of rows kept for n + 1 steps or more, of those that could have been
    held: float  # share of rows that are never evicted
    between_layers: Numbers  # [L, L]
    between_heads: Numbers  # [L, G]: mean overlap of each head with the layer's other heads; NaN for one group

    @property
    def label(self) -> str:
        return f"{self.policy} {self.size:,}"

    @property
    def length(self) -> int:
        return int(self.life.shape[-1])

    @property
    def heads(self) -> int:
        return int(self.recent.shape[-1])

    def first(self, positions: int) -> Numbers:
        """Mean steps kept of the first tokens of a chunk."""
        means: Numbers = self.life[:, :positions].mean(0)
        return means

    def quantile(self, share: float) -> int:
        """The smallest number of steps that at least this share of rows does not exceed."""
        below = self.counts.cumsum()
        return int(numpy.searchsorted(below, share * below[-1]))


class _ChunkSummary(NamedTuple):
    life: Numbers
    recent: Numbers
    recent_at_all_steps: float
    counts: Numbers
    did: Numbers
    could: Numbers
    held: float
    between_layers: Numbers
    between_heads: Numbers


def summarize(policy: str, size: int, traces: Iterable[ChunkTrace]) -> Summary:
    """Summarize the traces of all chunks; one trace is in memory at a time."""
    first_trace: ChunkTrace | None = None
    parts: list[_ChunkSummary] = []
    for one in traces:
        first_trace = first_trace or one
        parts.append(_summarize_chunk(one))
    if first_trace is None:
        raise UsageError("no traces to summarize: give at least one chunk")

    def mean(name: str) -> Numbers:
        return numpy.asarray(numpy.mean([getattr(part, name) for part in parts], axis=0))

    return Summary(
        policy,
        size,
        first_trace.layers,
        first_trace,
        life=numpy.stack([part.life for part in parts]),
        recent=mean("recent"),
        recent_at_all_steps=float(mean("recent_at_all_steps")),
        counts=numpy.sum([part.counts for part in parts], axis=0),
        survival=mean("did") / mean("could"),
        held=float(mean("held")),
        between_layers=mean("between_layers"),
        between_heads=mean("between_heads"),
    )


def _summarize_chunk(one: ChunkTrace) -> _ChunkSummary:
    times, kept, start = one.evicted_at, steps_kept(one.evicted_at), first_choice(max(one.sizes))
    length = times.shape[-1]
    shares = numpy.stack([recent(rows, size) for rows, size in zip(times, one.sizes, strict=True)])
    everywhere = [over_all_steps(row, size, length) for row, size in zip(shares, one.sizes, strict=True)]
    did, could = survivors(kept)
    return _ChunkSummary(
        kept.mean((0, 1)),
        shares,
        float(numpy.mean(everywhere)),
        numpy.bincount(kept.ravel(), minlength=length + 1),
        did,
        could,
        float((times == length).mean()),
        numpy.mean([between_rows(rows, start) for rows in times.swapaxes(0, 1)], axis=0),
        numpy.stack([off_diagonal(between_rows(rows, start)) for rows in times]),
    )


def agreement(one: Iterable[ChunkTrace], other: Iterable[ChunkTrace]) -> float:
    """Mean overlap of two policies on the same chunks, layer by layer; one group is compared with each head."""
    shares = []
    for a, b in zip(one, other, strict=True):
        rows = zip(a.evicted_at, b.evicted_at, map(max, a.sizes, b.sizes), strict=True)
        shares.append(numpy.nanmean([overlap(x, y, first_choice(size)).mean() for x, y, size in rows]))
    return float(numpy.mean(shares))
