"""Retention: which tokens a state still holds, by position, and the bytes that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray


class Retention(NamedTuple):
    """The tokens that the state of a sequence holds.

    A share is a mean over layers: 1 for a layer that holds the token, 0 for one that has evicted it. Where KV heads
    evict on their own, a layer counts with the share of its KV heads.
    """

    seen: int  # tokens read
    slots: int  # KV rows that fit, over all layers and the KV heads that evict on their own
    used: int  # KV rows in use
    nbytes: int
    full_nbytes: int  # a KV cache with every token that was read
    positions: NDArray[numpy.int32]  # of the tokens that are held anywhere, in order; the first token has position 0
    shares: NDArray[numpy.float64]  # for each of these positions
    protected: Sequence[tuple[int, int]] = ()  # ranges [begin, end) of positions that are not evicted
    recalled: Sequence[tuple[int, float]] | None = None  # positions of recalled rows, and the share of all KV heads

    def list_shares(self, before: Retention | None = None) -> list[tuple[int, float]]:
        """Positions and shares; with an earlier retention, only the changed ones, 0 for an evicted token."""
        if before is None:
            return list(zip(self.positions.tolist(), self.shares.tolist(), strict=True))
        both = numpy.union1d(before.positions, self.positions)
        old, new = (numpy.zeros(len(both)) for _ in range(2))
        old[numpy.searchsorted(both, before.positions)] = before.shares
        new[numpy.searchsorted(both, self.positions)] = self.shares
        changed = old != new
        return list(zip(both[changed].tolist(), new[changed].tolist(), strict=True))
