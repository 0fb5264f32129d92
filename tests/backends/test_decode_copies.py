"""A decode step of some sequences of the slots: as each of them alone, whatever its slots have held before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend
from msrnn.bound import Bound
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots
from msrnn.errors import UsageError
from msrnn.policy import Policy
from tests.helpers.layers import shape_and_scoring

pytestmark = pytest.mark.usefixtures("poisoned")

POLICIES = ("tova", "h2o", "window+2", "echo", "random", "tova+1~9", "decay=0.9,per=head,first=1,value_norm=1")
SEQUENCES, SIZE, PADDING = 6, 6, 0  # sequences of the slots; one of them is padding's
CHOSEN = [4, 1, PADDING, 5, PADDING]


class Pool:
    """The slots of some sequences, which have read different numbers of tokens."""

    def __init__(self, policy: str, device: str, heads: int) -> None:
        value = Policy.parse(policy)
        self.shape, self.scoring = shape_and_scoring(device, heads)
        self.slots = Slots(SEQUENCES, self.shape, Bound(value, SIZE, value.horizon))
        self.draw = torch.Generator().manual_seed(1)
        backend, lengths = resolve_backend("torch", torch.device(device)), [0, 4, 9, 3, 11, 2]
        for step in range(max(lengths)):
            position = torch.tensor([step if step < length else -1 for length in lengths], device=device)
            backend.decode(self.slots, *self.inputs(SEQUENCES), position.int(), self.scoring)
        self.lengths = lengths

    def inputs(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        B, K, R = count, self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
        sizes = (B, K, R, self.shape.key_dim), (B, K, self.shape.key_dim), (B, K, self.shape.value_dim)
        q, k, v = (torch.randn(size, generator=self.draw).to(self.shape.device, self.shape.dtype) for size in sizes)
        return q, k, v


def copy(slots: Slots) -> Slots:
    every: Slots = slots.select(torch.arange(slots.batch_size))
    return every


def step_alone(
    pool: Slots, sequence: int, inputs: list[Tensor], position: int, scoring: Scoring, backend: Any
) -> Tensor:
    alone: Slots = pool.view(slice(sequence, sequence + 1))
    if position == 0:
        alone.reset()
    at = torch.tensor([position], dtype=torch.int32, device=inputs[0].device)
    output: Tensor = backend.decode(alone, *inputs, at, scoring)
    return output


@pytest.mark.parametrize("heads", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_chosen_sequences_are_as_each_alone(name: str, policy: str, heads: int, device: str) -> None:
    """One of them begins anew, in slots that hold another one's tokens."""
    pool, plain = Pool(policy, device, heads), resolve_backend("torch", torch.device(device))
    mine, theirs = pool.slots, copy(pool.slots)
    chosen = torch.tensor(CHOSEN, device=device)
    at = [0 if sequence == 5 else -1 if sequence == PADDING else pool.lengths[sequence] for sequence in CHOSEN]
    for _ in range(3):
        inputs = pool.inputs(len(CHOSEN))
        position = torch.tensor(at, dtype=torch.int32, device=device)
        backend = resolve_backend(name, torch.device(device))
        output = backend.decode_chosen(mine, chosen, *inputs, position, pool.scoring)
        for i, sequence in enumerate(CHOSEN):
            if sequence != PADDING:
                given = [x[i : i + 1] for x in inputs]
                expected = step_alone(theirs, sequence, given, at[i], pool.scoring, plain)
                torch.testing.assert_close(output[i : i + 1], expected, atol=1e-4, rtol=1e-4)
            else:
                assert (output[i] == 0).all()
        at = [t + 1 if t >= 0 else -1 for t in at]
    assert torch.equal(mine.position.sort(-1).values, theirs.position.sort(-1).values)
    held = mine.position >= 0
    for kind in ("importance", "row_weight"):
        one, other = getattr(mine, kind), getattr(theirs, kind)
        if one is not None:
            order = [slots.position.argsort(-1) for slots in (mine, theirs)]
            pairs = [numbers.gather(-1, index) for numbers, index in zip((one, other), order, strict=True)]
            kept = held.gather(-1, order[0])
            torch.testing.assert_close(pairs[0][kept], pairs[1][kept], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_other_sequences_are_not_touched(name: str, device: str) -> None:
    pool, backend = Pool("h2o", device, 2), resolve_backend(name, torch.device(device))
    before = copy(pool.slots)
    position = torch.tensor([11, 4, -1, 0, -1], dtype=torch.int32, device=device)
    backend.decode_chosen(pool.slots, torch.tensor(CHOSEN, device=device), *pool.inputs(5), position, pool.scoring)
    for key, tensor in pool.slots.tensors().items():
        for sequence in (2, 3):
            assert torch.equal(tensor[sequence], before.tensors()[key][sequence]), (key, sequence)


def test_kernels_refuse_chosen_sequences_of_quantized_rows(device: str) -> None:
    shape, scoring = shape_and_scoring(device, 2)
    slots, pool = (
        Slots(1, replace(shape, state_dtype=torch.int8), Bound(Policy.parse("tova"), SIZE)),
        Pool("tova", device, 2),
    )
    position, backend = (
        torch.zeros(1, dtype=torch.int32, device=device),
        resolve_backend("triton", torch.device(device)),
    )
    with pytest.raises(UsageError, match="of rows in the model's dtype"):
        backend.decode_chosen(
            slots, torch.zeros(1, dtype=torch.int64, device=device), *pool.inputs(1), position, scoring
        )
