"""What is computed does not depend on torch's default dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from msrnn.backends.triton.decode import Tile
from msrnn.bound import Bound
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.policy import Policy
from tests.helpers.layers import BACKENDS, held, random_tokens, read

POSITIONS: dict[str, Any] = {"original": "original", "capped": "compressed:3", "function": lambda gap: gap**0.5}


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def run(backend: str, chunk: int, code: str | None, positions: Any, device: str) -> list[torch.Tensor]:
    shape = LayerShape(2, 2, 16, 16, torch.float32, torch.device(device), STATE_DTYPES[code] if code else None)
    frequency = 100.0 ** -(torch.arange(4, dtype=torch.float32, device=device) / 4)
    apart = spacing(positions)
    repositioning = Repositioning(apart, Rope(frequency)) if apart else None
    sinks = torch.tensor([0.5, -0.5], dtype=torch.float32, device=device)
    slots = Slots(1, shape, Bound(Policy.parse("echo"), 3))
    output = read(
        slots,
        random_tokens(1, 2, 2, 7, 16, device),
        Scoring(0.25, sinks=sinks, repositioning=repositioning),
        backend,
        chunk,
        2,
    )
    return [output, *held(slots)]


@pytest.mark.parametrize(
    ("backend", "positions"),
    [
        pytest.param(
            backend,
            given,
            marks=pytest.mark.slow if backend == "triton" and name != "capped" else (),
            id=f"{backend}-{name}",
        )
        for backend in BACKENDS
        for name, given in POSITIONS.items()
    ],
)
def test_the_default_dtype(
    backend: str, positions: Any, default: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cpu" and backend != "triton":
        pytest.skip("these run on a CPU")
    monkeypatch.setattr("msrnn.backends.triton.decode.PLAIN", Tile(2))  # split among programs
    cases = [(128, None)] if backend == "triton" else [(1, None), (128, None), (1, "int8")]
    expected = [run(backend, *case, positions, device) for case in cases]
    torch.set_default_dtype(default)
    found = [run(backend, *case, positions, device) for case in cases]
    torch.set_default_dtype(torch.float32)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
