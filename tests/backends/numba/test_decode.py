"""`decode_numba` against `TorchBackend.decode`: the same evictions, importances and outputs."""

from __future__ import annotations

import pytest
import torch

from msrnn.backends.numba.decode import decode_numba
from msrnn.backends.torch import TorchBackend
from msrnn.bound import Bound
from tests.helpers.bounds import BOUNDS
from tests.helpers.decode_steps import Run, layer


@pytest.mark.parametrize("bound", [pytest.param(bound, id=name) for name, bound in BOUNDS.items()])
def test_policies(bound: Bound) -> None:
    compare(layer("cpu", bound), steps=bound.size + 8)


def test_softcap_and_sinks() -> None:
    compare(layer("cpu", BOUNDS["h2o"], softcap=2.0, sinks=True), steps=16)


def compare(run: Run, steps: int) -> None:
    """One row of two is padding at every third step."""
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        query, key, value = run.inputs(draw)
        real = torch.tensor([[step % 3 != 1], [True]])
        position = run.slots.advance(1, real)[:, 0]
        theirs = run.copy()
        output = decode_numba(run.slots, query, key, value, position, run.scoring)
        expected = TorchBackend().decode(theirs, query, key, value, position, run.scoring)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
        assert torch.equal(run.slots.position, theirs.position)
        held = theirs.position >= 0
        for name in ("importance", "row_weight"):
            mine, other = getattr(run.slots, name), getattr(theirs, name)
            if other is not None:
                torch.testing.assert_close(mine[held], other[held], atol=1e-5, rtol=1e-4)
