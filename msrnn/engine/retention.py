"""Which tokens a state still holds, by position, and what it costs to hold them."""

from __future__ import annotations

from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from msrnn.core.slots import Slots
from msrnn.core.state import MultiState

DIGITS = 4  # of a share


class Retention(NamedTuple):
    """What one row of a state holds.

    A share is a mean over layers: 1 for a layer that holds the token, 0 for one that has evicted it. Where KV heads
    evict on their own, a layer counts with the share of its KV heads.
    """

    seen: int  # tokens read
    slots: int  # states that may be held, over all layers and the KV heads that evict on their own
    used: int  # states that are held
    nbytes: int
    full_nbytes: int  # a KV cache with every token that was read
    positions: NDArray[numpy.int32]  # of the tokens that are held anywhere, in order; the first token has position 0
    shares: NDArray[numpy.float64]  # for each of these positions

    def held(self, before: Retention | None = None) -> list[tuple[int, float]]:
        """Positions and shares; after an earlier one, only those that have changed, with 0 where nothing is left."""
        if before is None:
            return list(zip(self.positions.tolist(), self.shares.tolist(), strict=True))
        both = numpy.union1d(before.positions, self.positions)
        old, new = (numpy.zeros(len(both)) for _ in range(2))
        old[numpy.searchsorted(both, before.positions)] = before.shares
        new[numpy.searchsorted(both, self.positions)] = self.shares
        changed = old != new
        return list(zip(both[changed].tolist(), new[changed].tolist(), strict=True))


def retention_of(state: MultiState, row: int = 0) -> Retention:
    """What a row of a state holds now. All layers must have slots."""
    layers = state.layers
    device = layers[0].position.device
    places = [layer.position[row].flatten().to(device) for layer in layers]
    held_at = torch.cat([*places, layers[0].seen[row : row + 1].to(device, torch.int32)]).cpu().numpy()
    seen, position = int(held_at[-1]), held_at[:-1]
    groups = [layer.position.shape[1] for layer in layers]
    weights = numpy.repeat([1 / (len(layers) * each) for each in groups], [len(place) for place in places])
    held = position >= 0
    positions, where = numpy.unique(position[held], return_inverse=True)
    shares = numpy.zeros(len(positions))
    numpy.add.at(shares, where, weights[held])
    return Retention(
        seen,
        sum(layer.bound.size * each for layer, each in zip(layers, groups, strict=True)),
        int(held.sum()),
        state.nbytes // state.batch_size,
        seen * sum(_row_nbytes(layer) for layer in layers),
        positions,
        shares.round(DIGITS),
    )


def _row_nbytes(layer: Slots) -> int:
    """Bytes of one token's keys and values, not quantized."""
    return int(layer.keys.shape[1] * (layer.keys.shape[3] + layer.values.shape[3]) * layer.dtype.itemsize)
