"""Weights of the Triton prefill: which score they are relative to, and rows whose weights have vanished."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend
from msrnn.backends.triton.prefill import HEADROOM
from msrnn.bound import Bound
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.layer import attend
from msrnn.policy import Policy
from tests.helpers.layers import read
from tests.helpers.sinks import read_with_sinks

SIZE = 20  # more slots than a block of the kernels holds here, so that a later block may score higher


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.backends.triton.prefill.MOST", 16)


def check(scores: Tensor, bound: Bound, device: str, sinks: Tensor | None = None, pieces: int = 1) -> None:
    """Outputs, shares of sinks and kept tokens of torch and Triton, where queries are ones and keys the scores [T]."""
    shape = LayerShape(2, 1, 16, 16, torch.float32, torch.device(device))
    key = torch.zeros(1, 1, len(scores), 16, device=device)
    key[0, 0, :, 0] = scores.to(device)
    query = torch.zeros(1, 2, len(scores), 16, device=device)
    query[..., 0] = 1.0
    value = torch.randn(key.shape, generator=torch.Generator().manual_seed(0)).to(device)
    scoring, found = Scoring(1.0, None, None if sinks is None else sinks.to(device)), []
    for backend in ("torch", "triton"):
        slots, real = Slots(1, shape, bound), torch.ones(1, len(scores), dtype=torch.bool, device=device)
        given = slots, (query, key, value), real, scoring, (len(scores) // pieces,) * pieces
        attended = read_with_sinks(resolve_backend(backend, real.device), *given)
        found.append((*attended, slots.position.sort(-1).values))
    rounding = 1e-5 + 2**-22 * float(scores.abs().max())  # an error of a score is a relative error of its weight
    torch.testing.assert_close(found[1][0], found[0][0], atol=rounding, rtol=rounding)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-30, rtol=rounding)
    assert torch.equal(found[1][2], found[0][2])


@pytest.mark.parametrize("height", [pytest.param(10.0, marks=pytest.mark.slow), 60.0])
def test_a_later_block_scores_higher(height: float, device: str) -> None:
    """Weights relative to the first block would overflow."""
    scores = torch.linspace(0, 1, 40)
    scores[30:] += height
    check(scores, Bound(Policy.parse("tova"), SIZE), device, pieces=2)


def test_the_first_block_holds_nothing(device: str) -> None:
    """Weights relative to zero would vanish, and the oldest would be evicted instead of the least important."""
    check(torch.linspace(0, -3, 30) - 200, Bound(Policy.parse("tova"), SIZE), device)


@pytest.mark.parametrize(
    ("depth", "sinks"), [pytest.param(100.0, False, marks=pytest.mark.slow), (130.0, True), (300.0, False)]
)
def test_what_a_row_still_sees_is_far_below_what_it_lost(depth: float, sinks: bool, device: str) -> None:
    """The first tokens have all weight, and leave the window inside the chunk."""
    scores = torch.linspace(0, 2, 40) - depth
    scores[:3] = 0.0
    bound = Bound(Policy.parse("tova"), SIZE, window=12)
    check(scores, bound, device, torch.tensor([-depth, -depth + 1]) if sinks else None)


@pytest.mark.gpu  # triton's interpreter is slow
def test_sums_over_many_candidates_and_heads_do_not_overflow() -> None:
    """All but the first block score higher by less than what makes it start again."""
    device = "cuda"
    shape = LayerShape(64, 1, 16, 16, torch.float32, torch.device(device))
    found = []
    for backend in ("torch", "triton"):
        slots = Slots(1, shape, Bound(Policy.parse("h2o-layer"), 100))
        slots.position[0, 0, :100] = torch.arange(100, dtype=torch.int32)
        slots.seen.fill_(100)
        slots.keys[0, 0, 16:100, 0] = HEADROOM.value - 0.1
        query, row = torch.zeros(1, 64, 2, 16, device=device), torch.zeros(1, 1, 2, 16, device=device)
        query[..., 0] = 1.0
        read(slots, (query, row, row), Scoring(1.0), backend, 128)
        assert slots.importance is not None
        found.append(slots.importance)
    torch.testing.assert_close(found[1].sort(-1).values, found[0].sort(-1).values, atol=1e-6, rtol=1e-4)


def test_nan_in_padding(device: str) -> None:
    shape, bound = LayerShape(2, 1, 16, 16, torch.float32, torch.device(device)), Bound(Policy.parse("tova"), 5)
    query, key, value = (
        torch.randn(1, h, 9, 16, generator=torch.Generator().manual_seed(h)).to(device) for h in (2, 1, 1)
    )
    value[:, :, :3] = torch.nan
    slots, real = Slots(1, shape, bound), torch.arange(9, device=device)[None] >= 3
    backend = resolve_backend("triton", real.device)
    output = attend(slots, query, key, value, slots.advance(9, real), Scoring(0.25), 128, backend)
    assert output.isfinite().all()


def test_nan_in_an_empty_slot(device: str) -> None:
    """An evicted token leaves its row behind: zero times NaN would be NaN."""
    shape, bound = LayerShape(2, 1, 16, 16, torch.float32, torch.device(device)), Bound(Policy.parse("tova"), SIZE)
    tokens = tuple(torch.randn(1, h, 9, 16, generator=torch.Generator().manual_seed(h)).to(device) for h in (2, 1, 1))
    slots, clean = Slots(1, shape, bound), Slots(1, shape, bound)
    slots.values.fill_(torch.nan)
    slots.keys.fill_(torch.nan)
    output = read(slots, tokens, Scoring(0.25), "triton", 128)
    torch.testing.assert_close(output, read(clean, tokens, Scoring(0.25), "torch", 128), atol=1e-5, rtol=1e-5)
