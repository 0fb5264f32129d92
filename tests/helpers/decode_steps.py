"""Decode steps of one layer by triton, compared with `TorchBackend.decode`.

A rounding of the result comes on top: triton's interpreter cuts digits off where a GPU rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends.torch import TorchBackend
from msrnn.backends.triton.decode import decode_triton
from msrnn.bound import Bound
from msrnn.core.rope import Rope
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from tests.helpers.bounds import protect_some
from tests.helpers.layers import shape_and_scoring
from tests.helpers.networks import add_network

slow = pytest.mark.slow  # in triton's interpreter; a GPU runs all of them


def but(kept: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """All cases, of which only those `kept` are not slow."""
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=slow)
        for case in every
    ]


class Run:
    """A layer that is decoded token by token, some rows of it padding now and then."""

    def __init__(self, bound: Bound, shape: LayerShape, batch: int, scoring: Scoring) -> None:
        shape = add_network(shape, bound, Rope(100.0 ** -(torch.arange(4, device=shape.device) / 4), 2))
        self.bound, self.shape, self.scoring = bound, shape, scoring
        self.slots = Slots(batch, shape, bound)
        protect_some(self.slots)

    def inputs(self, draw: torch.Generator) -> list[Tensor]:
        B, K, R = self.slots.batch_size, self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
        sizes = (B, K, R, self.shape.key_dim), (B, K, self.shape.key_dim), (B, K, self.shape.value_dim)
        return [torch.randn(size, generator=draw).to(self.shape.device, self.shape.dtype) for size in sizes]

    def copy(self, dtype: torch.dtype | None = None) -> Slots:
        slots: Slots = self.slots.select(torch.arange(self.slots.batch_size))
        if dtype is not None:
            slots.dtype = dtype
            if slots.state_dtype is None:
                slots.keys, slots.values = slots.keys.to(dtype), slots.values.to(dtype)
        return slots


def check(run: Run, steps: int, before: int = 0) -> None:
    """Compare `steps` steps; those `before` are taken by torch, since triton's interpreter is slow."""
    draw = torch.Generator().manual_seed(0)
    for step in range(before + steps):
        query, key, value = run.inputs(draw)
        if run.scoring.repositioning is not None and step == max(4, before):
            run.slots.seen += 30  # a gap that is worth compressing
        real = None
        if step % 5 == 2:
            real = torch.ones(run.slots.batch_size, 1, dtype=torch.bool, device=run.shape.device)
            real[0] = False
        position = run.slots.advance(1, real)[:, 0]
        given = (query, key, value, position, run.scoring)
        if step < before:
            TorchBackend().decode(run.slots, *given)
            continue
        theirs, exact = run.copy(), run.copy(torch.float32)
        shares = torch.full((3, *query.shape[:3]), torch.nan, dtype=torch.float32, device=query.device)
        output = decode_triton(run.slots, *given, shares[0])
        reference = TorchBackend().decode(theirs, *given, shares[1])
        exactly = query.float(), key.float(), value.float(), position, run.scoring
        truth = TorchBackend().decode(exact, *exactly, shares[2])
        if real is not None:
            assert (output[0] == 0).all()
            assert (shares[0, 0] == 0).all()
        assert (shares[0] - shares[2]).abs().max() <= 2 * (shares[1] - shares[2]).abs().max() + 1e-5
        rounding = torch.finfo(run.shape.dtype).eps * truth.abs().max()
        allowed = 2 * (reference.float() - truth).abs().max() + rounding + 1e-5
        assert (output.float() - truth).abs().max() <= allowed
        assert torch.equal(run.slots.position, exact.position), "another token left than in float32"
        if run.shape.state_dtype is not None:
            empty = (exact.position < 0)[..., None]
            for mine, expected in zip(run.slots.dequantized(), theirs.dequantized(), strict=True):
                same = torch.equal(mine.masked_fill(empty, 0), expected.masked_fill(empty, 0))
                assert same, "rounded otherwise than by `encode`"
        held = exact.position >= 0
        for name in ("importance", "row_weight"):
            mine, expected = getattr(run.slots, name), getattr(exact, name)
            if expected is not None:
                torch.testing.assert_close(mine[held], expected[held], atol=1e-4, rtol=1e-3)


def layer(device: str, bound: Bound, *heads: Any, **options: Any) -> Run:
    shape, scoring = shape_and_scoring(device, *heads, **options)
    return Run(bound, shape, 2, scoring)
