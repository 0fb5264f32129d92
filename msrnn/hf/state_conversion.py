"""States of other positions, or of another horizon or `first` of a policy, for the RNN that continues with them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from msrnn.core.archive import MoveKeys
from msrnn.core.fingerprint import ARCHIVED_KEYS, RECALL, UNROTATED
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.rope import ORIGINAL
from msrnn.core.slots import Slots
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.state_spec import StateSpec
from msrnn.policy import Policy, same_ranking


def convert_state(state: MultiState, spec: StateSpec) -> MultiState:
    """A copy of a state as `spec` describes it; see `MultiStateRNN.convert_state`."""
    theirs, mine = state.fingerprint, dict(spec.fingerprint)
    mine["positions"] = theirs["positions"]
    mine.pop(ARCHIVED_KEYS, None)
    if RECALL in mine and theirs["positions"] != ORIGINAL:
        mine[ARCHIVED_KEYS] = UNROTATED  # archives of version 0.1 had rotated keys
    with suppress(UsageError):  # the name of a Python function cannot be read, and must be the same
        if same_ranking(*map(Policy.parse, (mine["policy"], theirs["policy"]))):
            mine["policy"] = theirs["policy"]
    state.check_fits(mine)
    layers = state.fork(1).layers
    for i, (layer, bound) in enumerate(zip(layers, spec.bounds, strict=True)):
        if isinstance(layer, RecallSlots):
            layers[i] = spec.memory(i, state.batch_size)
            layers[i].take_rows(layer, _find_move(spec, i, theirs["positions"] != ORIGINAL))
        elif isinstance(layer, Slots) and bound is not None:
            layer.bound = bound
    converted = MultiState(layers, spec.fingerprint, state.columns)
    if any(state.protected):
        spec.check_protect()
        converted.find_ranges(torch.zeros(state.batch_size))
    return converted


def _find_move(spec: StateSpec, layer: int, unrotated: bool) -> MoveKeys | None:
    """How the archived keys of a layer change: where keys are re-rotated, these have no rotation."""
    repositioned = spec.repositioning[layer] is not None
    rope = spec.model.ropes[layer] if repositioned != unrotated else None
    if rope is None:
        return None

    def move(keys: Tensor, position: Tensor) -> Tensor:
        own = replace(rope, frequency=rope.frequency.to(keys.device))
        angle = own.angle(position, torch.zeros_like(position))
        return own.rotate(keys, angle if repositioned else -angle).to(keys.dtype)

    return move
