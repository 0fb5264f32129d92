"""`keep_triton` against `Slots.keep`: the same tokens in the same slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from msrnn.backends.triton.keep import keep_triton
from msrnn.bound import Bound
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.slots import HELD, Slots
from msrnn.policy import Policy
from tests.helpers.layers import held, random_tokens, shape_and_scoring


@pytest.mark.parametrize("policy", ["tova", "h2o", "echo"])
@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_survivors_of_a_chunk_fill_free_slots(policy: str, state_dtype: str | None, device: str) -> None:
    options: dict[str, Any] = {"state_dtype": STATE_DTYPES[state_dtype] if state_dtype else None}
    slots = Slots(2, shape_and_scoring(device, **options)[0], Bound(Policy.parse(policy), 5))
    for count in (4, 9):  # into empty slots, then into those that become free
        draw = torch.Generator().manual_seed(count)
        _, key, value = random_tokens(2, 4, 2, count, 16, device, seed=count)
        rows, position = slots.quantize(key, value), slots.advance(count, None)
        position, importance, row_weight = slots.candidates(position, slots.weigh(*rows, position[:, None]))
        importance += torch.rand(importance.shape, generator=draw).to(device)
        stays = (
            torch.rand(position.shape, generator=draw).to(device).masked_fill(position < 0, -1).argsort(-1)[..., -5:]
        )
        evicted_at = torch.zeros_like(position).scatter_(-1, stays, HELD)
        theirs: Slots = slots.select(torch.arange(2))
        keep_triton(slots, *rows, position, importance, row_weight, evicted_at)
        theirs.keep(*rows, position, importance, row_weight, (evicted_at == HELD) & (position >= 0))
        assert torch.equal(slots.position, theirs.position)
        for mine, expected in zip(held(slots), held(theirs), strict=True):
            assert torch.equal(mine, expected)
