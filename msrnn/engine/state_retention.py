"""Compute which tokens a state holds, from its slots."""

from __future__ import annotations

import numpy
import torch

from msrnn.core.slots import Slots
from msrnn.core.state import MultiState
from msrnn.engine.retention import Retention

DIGITS = 4  # of a share


def retention_of(state: MultiState, slot: int = 0) -> Retention:
    """The retention of one sequence of a state, by its batch slot. All layers must have fixed slots."""
    layers = state.layers
    device = layers[0].position.device
    places = [layer.position[slot].flatten().to(device) for layer in layers]
    ranges, seen_here = layers[0].protected[slot].flatten().to(device), layers[0].seen[slot : slot + 1]
    found = torch.cat([ranges, *places, seen_here.to(device, torch.int32)]).cpu().numpy()  # one copy from the device
    pairs, position, seen = found[: len(ranges)].reshape(-1, 2), found[len(ranges) : -1], int(found[-1])
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
        [(begin, end) for begin, end in pairs.tolist() if begin < end],
    )


def _row_nbytes(layer: Slots) -> int:
    """Bytes of one token's keys and values, not quantized."""
    return int(layer.keys.shape[1] * (layer.keys.shape[3] + layer.values.shape[3]) * layer.dtype.itemsize)
