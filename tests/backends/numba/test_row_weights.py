"""The learned weight of a decode step's row: the loop against the code that all backends share."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from msrnn.backends.numba.row_weights import _PREPARED, weigh_token
from msrnn.bound import Bound
from msrnn.core.quantization import Rows
from msrnn.core.rope import Rope
from msrnn.core.row_weights import draw_weights
from msrnn.core.slots import Slots
from msrnn.policy import Policy
from tests.helpers.layers import shape_and_scoring
from tests.helpers.networks import add_network
from tests.helpers.ropes import ROPES

LEARNED = Policy(0.9, "head", value_norm=True, weights="x.safetensors")


def make(policy: Policy, rope: Rope | None = None) -> Slots:
    bound = Bound(policy, 5)
    return Slots(3, add_network(shape_and_scoring("cpu")[0], bound, rope), bound)


def rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key and value [3, 2, 16] and position [3]."""
    draw = torch.Generator().manual_seed(seed)
    key, value = (3 * torch.randn(3, 2, 16, generator=draw) for _ in range(2))
    return key, value, torch.tensor([0, 1000, 2**31 - 2**20], dtype=torch.int32)


def expected(slots: Slots, key: torch.Tensor, value: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    found = slots.weigh(Rows(key[:, :, None], None), Rows(value[:, :, None], None), position[:, None, None])
    assert found is not None
    return found


@pytest.mark.parametrize("per", ["head", "layer"])
@pytest.mark.parametrize("rope", ROPES)
def test_weights_are_those_of_the_reference(rope: str, per: Any) -> None:
    slots = make(replace(LEARNED, per=per), ROPES[rope])
    for seed in range(5):
        found = weigh_token(slots, *rows(seed))
        assert found is not None
        assert found.shape == (3, 2 if per == "head" else 1, 1)
        torch.testing.assert_close(found, expected(slots, *rows(seed)), rtol=2e-6, atol=0)


def test_zeros_far_inputs_and_nan() -> None:
    slots = make(replace(LEARNED, per="layer"))
    key, value, position = rows()
    value[0], key[1], key[2, 0, 0] = 0, 1e30, math.nan
    found = weigh_token(slots, key, value, position)
    assert found is not None
    torch.testing.assert_close(found, expected(slots, key, value, position), rtol=2e-6, atol=0, equal_nan=True)
    assert found[0].item() == pytest.approx(math.exp(-20))
    assert found[2].isnan()


def test_random_weights_stay_as_they_are() -> None:
    slots = make(Policy.parse("random"))
    key, value, position = rows()
    found = weigh_token(slots, key, value, position)
    assert found is not None
    assert torch.equal(found, draw_weights(position[:, None, None], slots.layer, range(2)))


def test_what_was_prepared_goes_with_its_network() -> None:
    gc.collect()
    before = len(_PREPARED)
    slots = make(LEARNED)
    weigh_token(slots, *rows())
    assert len(_PREPARED) == before + 1
    del slots
    gc.collect()
    assert len(_PREPARED) == before
