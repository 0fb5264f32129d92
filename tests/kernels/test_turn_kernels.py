"""Turns on a GPU against `msrnn.positions`, near and far."""

from __future__ import annotations

import pytest
import torch

from msrnn.kernels.turn_triton import turns_of
from msrnn.policy import Bound, policy
from msrnn.positions import SPACINGS, Places, Rotary, spacing
from msrnn.slots import LayerShape, Slots

pytestmark = pytest.mark.usefixtures("poisoned")

FAR = 1_000_000


@pytest.mark.parametrize("name", [*SPACINGS, "compressed:5", "its own"])
def test_turns_are_exact_to_rounding(name: str, device: str) -> None:
    apart = spacing((lambda gap: gap / 3) if name == "its own" else name)
    assert apart is not None
    frequency = 10_000.0 ** -(torch.arange(12, dtype=torch.float32, device=device) / 12)
    places = Places(apart, Rotary(frequency))
    slots = Slots(2, LayerShape(2, 2, 24, 24, torch.float32, torch.device(device)), Bound(policy("tova"), 8))
    slots.position[0, 0] = torch.tensor([70_000, -1, 3, FAR - 2, 0, 14, 4, -1, FAR - 20])
    slots.position[1, 0, 5] = 7
    query_position = torch.tensor([FAR, 19], dtype=torch.int32, device=device)
    turns = turns_of(slots, query_position, places)

    position = torch.cat([slots.position, query_position[:, None, None]], dim=-1)
    place = places.spacing.places(position, position >= 0)
    angle = places.rotary.angle(position, place)
    held = position >= 0
    expected = torch.stack([angle.cos(), angle.sin()], dim=-2).float()
    torch.testing.assert_close(turns[held], expected[held], atol=3e-7, rtol=0)
