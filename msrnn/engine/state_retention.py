"""Compute which tokens a state holds, from its slots."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from msrnn.core.recall_slots import RecallSlots
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
    fewer = [layer.fewer[slot, :1].to(device) for layer in layers]
    parts = ranges, torch.cat(places), torch.cat(fewer), seen_here.to(device, torch.int32)
    found = torch.cat(parts).cpu().numpy()  # one copy from the device
    pairs, position, fewer_rows, last = numpy.split(found, numpy.cumsum([len(part) for part in parts[:-1]]))
    pairs, seen, sizes = pairs.reshape(-1, 2), int(last[0]), [layer.bound.size for layer in layers] - fewer_rows
    groups = [layer.position.shape[1] for layer in layers]
    weights = numpy.repeat([1 / (len(layers) * each) for each in groups], [len(place) for place in places])
    held = position >= 0
    positions, shares = _add_shares(position[held], weights[held])
    return Retention(
        seen,
        int((sizes * groups).sum()),
        int(held.sum()),
        state.nbytes // state.batch_size,
        seen * sum(_row_nbytes(layer) for layer in layers),
        positions,
        shares,
        [(begin, end) for begin, end in pairs.tolist() if begin < end],
        _list_recalled(state, slot),
    )


def _add_shares(positions: NDArray[Any], shares: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The positions in order, once each, and the sum of the shares of each."""
    found, where = numpy.unique(positions, return_inverse=True)
    added = numpy.zeros(len(found))
    numpy.add.at(added, where, shares)
    return found, added.round(DIGITS)


def _list_recalled(state: MultiState, slot: int) -> list[tuple[int, float]] | None:
    """The positions of a sequence's guests, and the share of the KV heads of all layers; None: nothing is archived."""
    guests = [layer.guest_position[slot] for layer in state.layers if isinstance(layer, RecallSlots)]
    if not guests:
        return None
    heads = sum(layer.keys.shape[1] for layer in state.layers)
    position = torch.cat([each.flatten().to(guests[0].device) for each in guests]).cpu().numpy()
    position = position[position >= 0]
    positions, shares = _add_shares(position, numpy.full(len(position), 1 / heads))
    return [*zip(positions.tolist(), shares.tolist(), strict=True)]


def _row_nbytes(layer: Slots) -> int:
    """Bytes of one token's keys and values, not quantized."""
    return int(layer.keys.shape[1] * (layer.keys.shape[3] + layer.values.shape[3]) * layer.dtype.itemsize)
