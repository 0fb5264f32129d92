"""The weight of a new row in a decode step: the kernels against the code that all backends share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from msrnn.backends.triton.decode import decode_triton
from msrnn.backends.triton.row_weight import grade_rows, grade_token, grade_written, weigh_triton
from msrnn.bound import Bound
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.row_weights import draw_weights
from msrnn.core.slots import Slots
from msrnn.policy import Policy
from tests.helpers.decode_steps import check, layer
from tests.helpers.layers import shape_and_scoring
from tests.helpers.networks import add_network
from tests.helpers.ropes import ROPES

pytestmark = pytest.mark.usefixtures("poisoned")
LEARNED = Bound(Policy(0.9, "head", value_norm=True, weights="x.safetensors"), 5)
TOGETHER = replace(LEARNED, policy=replace(LEARNED.policy, per="layer"))


@pytest.mark.parametrize("number", [0, 1, 79])
def test_random_weights_are_the_same_bit_by_bit(number: int, device: str) -> None:
    shape, scoring = shape_and_scoring(device)
    slots = Slots(3, replace(shape, layer=number), Bound(Policy.parse("random"), 2))
    slots.seen.copy_(torch.tensor([0, 77, 2**31 - 2**20]))
    position = slots.advance(1, None)
    query, key, value = (torch.randn(3, 2, *more, 16).to(device) for more in ((2,), (), ()))
    decode_triton(slots, query, key, value, position[:, 0], scoring)
    assert slots.row_weight is not None
    assert torch.equal(slots.row_weight[..., :1], draw_weights(position[:, None], number, range(2)))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("code", [None, *STATE_DTYPES])
def test_networks(rope: str, code: str | None, device: str) -> None:
    """Rows of every kind, at positions near and far, of a chunk and of a step, which skips padding."""
    own = ROPES[rope]
    own = own and replace(own, frequency=own.frequency.to(device))
    shape, _ = shape_and_scoring(device, state_dtype=STATE_DTYPES[code] if code else None)
    for bound, tokens in ((LEARNED, 3), (TOGETHER, 7)):  # a program for each row, and for several
        slots = Slots(3, add_network(shape, bound, own), bound)
        slots.seen.copy_(torch.tensor([0, 1000, 100_000]))
        draw = torch.Generator().manual_seed(0)
        key, value = (torch.randn(3, tokens, 2, 16, generator=draw).transpose(1, 2).to(device) for _ in range(2))
        position = slots.advance(tokens, None).contiguous()
        position[1, 0] = -1
        fresh = slots.quantize(key, value)
        expected = slots.weigh(*fresh, position[:, None])
        found = weigh_triton(slots, *fresh, position)
        assert expected is not None
        assert found is not None
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        graded = grade_rows(slots, *fresh, position).graded[[0, 2], :, -1:]
        keys, values = (rows.map(lambda tensor: tensor[:, :, -3:]) for rows in fresh)
        held, importance, weight = slots.candidates(position[:, -3:], expected[..., -3:])
        slots.keep(keys, values, held, importance, weight, held >= 0)
        last = slots.position.argmax(-1).int()
        step = position[:, -1].clone()
        step[1] = -1
        torch.testing.assert_close(grade_written(slots, last, step)[[0, 2]], graded, atol=1e-5, rtol=1e-5)
        if code is None:
            token = grade_token(slots, key[:, :, -1].contiguous(), value[:, :, -1].contiguous(), step)
            torch.testing.assert_close(token[[0, 2]], graded, atol=1e-5, rtol=1e-5)


def test_a_row_that_is_not_a_number_stays_one(device: str) -> None:
    shape, _ = shape_and_scoring(device)
    slots = Slots(2, add_network(shape, LEARNED), LEARNED)
    slots.keys[0, 1, 0, 3] = torch.nan
    slots.keys[1, 0, 0] = 3e38
    slot = torch.zeros(2, 2, dtype=torch.int32, device=device)
    graded = grade_written(slots, slot, slots.advance(1, None)[:, 0])[..., 0]
    assert graded.isnan().tolist() == [[False, True], [False, False]]
    assert bool(graded[1].isfinite().all())


def test_a_state_without_a_free_slot_is_left_alone(device: str) -> None:
    shape, _ = shape_and_scoring(device)
    slots = Slots(1, add_network(shape, LEARNED), LEARNED)
    beyond: Tensor = torch.full((1, 2), 6, dtype=torch.int32, device=device)
    grade_written(slots, beyond, slots.advance(1, None)[:, 0])


@pytest.mark.parametrize("code", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_steps(code: str | None, device: str) -> None:
    run = layer(device, TOGETHER, 6, 3, state_dtype=STATE_DTYPES[code] if code else None)
    check(run, steps=4, before=TOGETHER.size + 2)
