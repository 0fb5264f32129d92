"""Bounds to test kernels with: every policy, odd sizes, a window, a horizon."""

from __future__ import annotations

import pytest

from msrnn.bound import Bound
from msrnn.core.slots import Slots
from msrnn.policy import Policy

BOUNDS = {
    "tova": Bound(Policy.parse("tova"), 6),
    "tova-head": Bound(Policy.parse("tova-head"), 33),
    "window": Bound(Policy.parse("window"), 1),
    "window+4": Bound(Policy.parse("window+4"), 7),
    "h2o": Bound(Policy.parse("h2o"), 8),
    "decay": Bound(Policy(0.5, "layer", 2, 0.25), 9),
    "decay-sliding": Bound(Policy(0.9, "head", 1, 2), 6, window=9, sliding=True),
    "echo+2~12": Bound(Policy.parse("echo+2~12"), 9, window=12),
    "decay-value": Bound(Policy(0.9, "layer", 0, 0.5, value_norm=True), 9),
    "value-head": Bound(Policy(0.0, "head", 1, value_norm=True), 6),
    "learned+1": Bound(Policy.parse("echo+1@x.safetensors"), 8),
    "learned-head": Bound(Policy(0.0, "head", value_norm=True, weights="x.safetensors"), 6),
    "random+1~12": Bound(Policy.parse("random+1~12"), 7, window=12),
}
# For triton's interpreter, which is slow; a GPU runs all of them.
FURTHER = ("tova-head", "decay", "value-head", "learned-head")
CASES = [
    pytest.param(bound, id=name, marks=pytest.mark.slow if name in FURTHER else ()) for name, bound in BOUNDS.items()
]


def protect_some(slots: Slots) -> None:
    """Protect a few tokens of each sequence, other ones in each, as far as the policy allows it."""
    room = slots.bound.size - slots.bound.policy.first - slots.bound.recent - 1
    for sequence in range(slots.batch_size):
        begin = slots.bound.policy.first + 2 + sequence
        for number, count in enumerate((room - room // 2, room // 2)):  # two ranges
            slots.protected[sequence, number, 0] = begin
            slots.protected[sequence, number, 1] = begin = begin + min(count, 2)
            begin += 3
