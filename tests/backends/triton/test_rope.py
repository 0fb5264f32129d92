"""Re-rotation on a GPU against `msrnn.core.rope`, at small and large positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from msrnn.backends.triton.rope import GAPS, _encode_spacing, check_reach, rotations_of
from msrnn.bound import Bound
from msrnn.core.rope import SPACINGS, Gap, Repositioning, Rope, Spacing, spacing
from msrnn.core.slots import LayerShape, Slots
from msrnn.policy import Policy

pytestmark = pytest.mark.usefixtures("poisoned")

FAR = 1_000_000


@pytest.mark.parametrize("name", [*SPACINGS, "compressed:5", "its own"])
def test_turns_are_exact_to_rounding(name: str, device: str) -> None:
    apart = spacing((lambda gap: gap / 3) if name == "its own" else name)
    assert apart is not None
    frequency = 10_000.0 ** -(torch.arange(12, dtype=torch.float32, device=device) / 12)
    repositioning = Repositioning(apart, Rope(frequency))
    slots = Slots(2, LayerShape(2, 2, 24, 24, torch.float32, torch.device(device)), Bound(Policy.parse("tova"), 8))
    slots.position[0, 0] = torch.tensor([70_000, -1, 3, FAR - 2, 0, 14, 4, -1, FAR - 20])
    slots.position[1, 0, 5] = 7
    query_position = torch.tensor([FAR, 19], dtype=torch.int32, device=device)
    rotations = rotations_of(slots, query_position, repositioning)

    position = torch.cat([slots.position, query_position[:, None, None]], dim=-1)
    new_position = repositioning.spacing.reposition(position, position >= 0)
    angle = repositioning.rope.angle(position, new_position)
    held = position >= 0
    expected = torch.stack([angle.cos(), angle.sin()], dim=-2).float()
    torch.testing.assert_close(rotations[held], expected[held], atol=3e-7, rtol=0)


def divide(by: int, gap: int) -> float:
    return gap / by


def compress(gap: str | Gap) -> Spacing:
    found = spacing(gap)
    assert found is not None
    return found


def test_a_spacing_owns_its_table(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured graphs read it: it must not move or be freed, however many others there are."""
    monkeypatch.setattr("msrnn.backends.triton.rope.GAPS", 50)
    where = torch.device(device)
    spacings = [compress(partial(divide, n)) for n in range(2, 12)]
    spacings += [compress(f"compressed:{n}") for n in range(1, 11)]
    tables = [_encode_spacing(chosen, where)[1] for chosen in spacings]
    addresses = [table.data_ptr() for table in tables]
    for n in range(20):
        _encode_spacing(compress(f"compressed:{n + 100}"), where)
    for n, (chosen, table, address) in enumerate(zip(spacings, tables, addresses, strict=True)):
        assert _encode_spacing(chosen, where)[1] is table
        assert table.data_ptr() == address
        gaps = torch.arange(50, dtype=torch.float64)
        expected = gaps / (n + 2) if n < 10 else torch.tensor([n - 9.0], dtype=torch.float64)
        assert torch.equal(table.cpu(), expected)


def far_away(device: str, name: Any, at: int) -> tuple[Slots, torch.Tensor, Repositioning]:
    apart = spacing(name)
    assert apart is not None
    repositioning = Repositioning(apart, Rope(torch.ones(2, dtype=torch.float32, device=device)))
    slots = Slots(1, LayerShape(1, 1, 4, 4, torch.float32, torch.device(device)), Bound(Policy.parse("tova"), 2))
    slots.position[0, 0, 0] = 0
    return slots, torch.tensor([at], dtype=torch.int32, device=device), repositioning


@pytest.mark.parametrize("at", [GAPS - 1, GAPS, 2**30])
def test_gaps_beyond_the_table_are_not_made_up(at: int, device: str) -> None:
    rotations = rotations_of(*far_away(device, lambda gap: 1.0, at))
    assert bool(rotations[0, 0, -1].isnan().any()) is (at >= GAPS)
    assert rotations_of(*far_away(device, "compressed", at))[0, 0, -1].isfinite().all()


def test_a_function_out_of_reach_is_refused(device: str) -> None:
    slots, _, repositioning = far_away(device, lambda gap: 1.0, 7)
    check_reach(repositioning.spacing, slots.bound, GAPS)
    with pytest.raises(
        ValueError, match="limited to gaps of 1,048,575 on a GPU, and this state is at column 1,048,577"
    ):
        check_reach(repositioning.spacing, slots.bound, GAPS + 1)
    near = Bound(Policy.parse("tova~4096"), 2, window=4096)
    check_reach(repositioning.spacing, near, 10**9)
    with pytest.raises(ValueError, match="limited to gaps"):
        check_reach(repositioning.spacing, Bound(Policy.parse("tova+1~4096"), 2, window=4096), 10**9)
    named = spacing("compressed")
    assert named is not None
    check_reach(named, Bound(Policy.parse("tova"), 2), 10**9)
