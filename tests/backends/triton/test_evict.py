"""Which token a step evicts: every policy, and states that fill several blocks."""

from __future__ import annotations

import pytest
import torch

from msrnn.bound import Bound
from msrnn.policy import Policy
from tests.helpers.bounds import CASES
from tests.helpers.decode_steps import but, check, layer

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("bound", CASES)
def test_policies(bound: Bound, device: str) -> None:
    check(layer(device, bound), steps=5, before=bound.size + 3)


@pytest.mark.parametrize("size", but([33], [33, 64, 100]))
def test_states_that_fill_several_blocks(size: int, device: str) -> None:
    """Keys grow along the slots, so that every block raises the maximum of the ones before it."""
    run = layer(device, Bound(Policy.parse("h2o-layer"), size), heads=6)
    slots, draw = run.slots, torch.Generator().manual_seed(2)
    growing = torch.linspace(0.1, 4, size + 1)[:, None]
    slots.keys.copy_(torch.randn(slots.keys.shape, generator=draw) * growing)
    slots.values.copy_(torch.randn(slots.values.shape, generator=draw))
    slots.position[..., :size] = torch.arange(size, dtype=torch.int32)
    assert slots.importance is not None
    slots.importance.copy_(torch.rand(slots.importance.shape, generator=draw))
    slots.seen.fill_(size)
    check(run, steps=3)
