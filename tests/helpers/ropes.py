"""A layer whose keys are re-rotated, and threads that take turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from msrnn.backends import resolve_backend
from msrnn.bound import Bound
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.layer import attend
from msrnn.policy import Policy

FREQUENCY = 10_000.0 ** -(torch.arange(16, dtype=torch.float32) / 16)
FAR = 1_000_000
ROPES = {  # of keys of 16 numbers
    "none": None,
    "halves": Rope(100.0 ** -(torch.arange(8) / 8)),
    "partial": Rope(100.0 ** -(torch.arange(3) / 3), start=10),
    "neighbours": Rope(100.0 ** -(torch.arange(5) / 5), interleaved=True),
}


def decoded(function: Callable[[int], float], at: int, backend: str) -> Slots:
    """A layer that keeps its first token and the newest, and reads three tokens from position `at` on."""
    apart = spacing(function)
    assert apart is not None
    slots = Slots(1, LayerShape(1, 1, 8, 8, torch.float32, torch.device("cpu")), Bound(Policy.parse("window+1"), 3))
    slots.position[0, 0, :2] = torch.tensor([0, at - 1])
    slots.seen.fill_(at)
    rows, scoring = torch.ones(1, 1, 3, 8), Scoring(0.5, repositioning=Repositioning(apart, Rope(FREQUENCY[:4])))
    attend(slots, rows, rows, rows, slots.advance(3, None), scoring, 128, resolve_backend(backend, rows.device))
    return slots


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
