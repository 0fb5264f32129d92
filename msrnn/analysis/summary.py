"""What the traces of all chunks say about one policy at one size, and about policies beside each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from msrnn.analysis.measures import (
    Numbers,
    between_rows,
    first_choice,
    off_diagonal,
    over_all_steps,
    overlap,
    recent,
    steps_kept,
    survivors,
)
from msrnn.analysis.trace_store import Traced
from msrnn.errors import UsageError

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True)
class Summary:
    """Of chunks of T tokens; a mean over groups and layers wherever those are not named."""

    policy: str
    size: int
    layers: tuple[int, ...]
    shown: Traced  # the first chunk's, for the pictures
    life: Numbers  # [N, T]: mean steps kept
    recent: Numbers  # [L, G]: share that `window` sees as well, over the steps that see what the policy chose
    recent_at_all_steps: float
    counts: Numbers  # [T + 1]: states (a token in a group of a layer) that were kept for so many steps
    survival: Numbers  # [T]: share of those kept for n + 1 steps or more, of those born early enough
    held: float  # share of states that are never dropped
    between_layers: Numbers  # [L, L]
    between_heads: Numbers  # [L, G]: each head's mean overlap with the layer's others; NaN where there is one group

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
        """The least number of steps that this share of states is kept for at most."""
        below = self.counts.cumsum()
        return int(numpy.searchsorted(below, share * below[-1]))


class _Part(NamedTuple):
    """One chunk's share of a summary."""

    life: Numbers
    recent: Numbers
    recent_at_all_steps: float
    counts: Numbers
    did: Numbers
    could: Numbers
    held: float
    between_layers: Numbers
    between_heads: Numbers


def summarize(policy: str, size: int, traces: Iterable[Traced]) -> Summary:
    """One chunk's trace in memory at a time."""
    shown: Traced | None = None
    parts: list[_Part] = []
    for traced in traces:
        shown = shown or traced
        parts.append(_part(traced))
    if shown is None:
        raise UsageError("no traces to summarize")

    def mean(name: str) -> Numbers:
        return numpy.asarray(numpy.mean([getattr(part, name) for part in parts], axis=0))

    return Summary(
        policy,
        size,
        shown.layers,
        shown,
        life=numpy.stack([part.life for part in parts]),
        recent=mean("recent"),
        recent_at_all_steps=float(mean("recent_at_all_steps")),
        counts=numpy.sum([part.counts for part in parts], axis=0),
        survival=mean("did") / mean("could"),
        held=float(mean("held")),
        between_layers=mean("between_layers"),
        between_heads=mean("between_heads"),
    )


def _part(traced: Traced) -> _Part:
    times, kept, start = traced.evicted_at, steps_kept(traced.evicted_at), first_choice(max(traced.sizes))
    length = times.shape[-1]
    shares = numpy.stack([recent(rows, size) for rows, size in zip(times, traced.sizes, strict=True)])
    everywhere = [over_all_steps(row, size, length) for row, size in zip(shares, traced.sizes, strict=True)]
    did, could = survivors(kept)
    return _Part(
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


def agreement(one: Iterable[Traced], other: Iterable[Traced]) -> float:
    """Between two policies on the same chunks, layer by layer; one group is compared with each head of the other."""
    shares = []
    for a, b in zip(one, other, strict=True):
        rows = zip(a.evicted_at, b.evicted_at, map(max, a.sizes, b.sizes), strict=True)
        shares.append(numpy.nanmean([overlap(x, y, first_choice(size)).mean() for x, y, size in rows]))
    return float(numpy.mean(shares))
