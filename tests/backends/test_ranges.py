"""Attention far below a row's maximum still ranks: every backend against exponentials in float64."""

from __future__ import annotations

import math

import pytest
import torch

from msrnn.bound import Bound
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.policy import Policy
from tests.helpers.layers import BACKENDS, read

pytestmark = pytest.mark.usefixtures("narrow")
SPREADS = [(90, 95), (100, 110), (130, 134), (140, 145)]
DECODE = 0  # instead of a chunk: every token is a decode step


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and small blocks are more of them."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("msrnn.backends.triton.prefill.MOST", 16)


def oracle(scores: list[list[float]], bound: Bound) -> list[int]:
    """Kept tokens where head m scores token j with scores[m][j], whoever asks; by the definition, in float64."""
    kept: list[int] = []
    importance: dict[int, float] = {}
    for t in range(len(scores[0])):
        if bound.window is not None:
            kept = [j for j in kept if j < bound.spared or j > t - bound.window]
        kept.append(t)
        seen = dict.fromkeys(kept, 0.0)
        for head in scores:
            top = max(head[j] for j in kept)
            total = math.fsum(math.exp(head[j] - top) for j in kept)
            for j in kept:
                seen[j] += math.exp(head[j] - top) / total / len(scores)
        decay = bound.policy.decay or 0.0
        importance = {j: decay * importance.get(j, 0.0) + seen[j] for j in kept}
        if len(kept) > bound.size:
            free = [j for j in kept if bound.policy.first <= j <= t - bound.recent]
            kept.remove(min(free, key=lambda j: (importance[j], j)))
    return kept


def kept_by(backend: str, scores: list[list[float]], bound: Bound, chunk: int, device: str) -> list[int]:
    """The same of a layer whose queries are ones, and whose keys are the scores."""
    key = torch.zeros(1, len(scores), len(scores[0]), 16, dtype=torch.float32, device=device)
    key[0, :, :, 0] = torch.tensor(scores, dtype=torch.float32)
    query = torch.zeros_like(key)
    query[..., 0] = 1.0
    heads = len(scores)
    slots = Slots(1, LayerShape(heads, heads, 16, 16, torch.float32, torch.device(device)), bound)
    steps = key.shape[2] - 1 if chunk == DECODE else 0
    read(slots, (query, key, torch.ones_like(key)), Scoring(1.0), backend, chunk, steps)
    return sorted(p for p in slots.position[0, 0].tolist() if p >= 0)


def check(backend: str, scores: list[list[float]], bound: Bound, chunk: int, device: str = "cpu") -> None:
    # Scores as float32 has them.
    scores = torch.tensor(scores, dtype=torch.float32).double().tolist()
    assert kept_by(backend, scores, bound, chunk, device) == oracle(scores, bound)


@pytest.mark.parametrize("chunk", [DECODE, 128], ids=["decode", "chunk"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("near", "far"), SPREADS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_far_below_the_maximum(backend: str, near: int, far: int, heads: int, chunk: int, device: str) -> None:
    """The younger has less attention; if both had none, the older would be evicted."""
    if device != "cpu" and backend != "triton":
        pytest.skip("these run on a CPU")
    scores = [[m + 0.0, m - near, m - far] for m in range(heads)]
    assert oracle(scores, Bound(Policy.parse("tova"), 2)) == [0, 1]
    check(backend, scores, Bound(Policy.parse("tova"), 2), chunk, device)


@pytest.mark.parametrize("chunk", [DECODE, 1, 7, 128])
@pytest.mark.parametrize("spread", [50, 100, 145])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_any_scores(backend: str, heads: int, spread: int, chunk: int) -> None:
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        scores = -spread * torch.rand(heads, 30, generator=draw)
        scores[:, 0] = 0.0  # the maximum, which stays
        check(backend, scores.tolist(), Bound(Policy.parse("tova"), 6), chunk)


@pytest.mark.parametrize("chunk", [DECODE, 1, 128])
@pytest.mark.parametrize("spread", [20, 80])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_importances_that_are_stored(backend: str, spread: int, chunk: int) -> None:
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        scores = -spread * torch.rand(2, 30, generator=draw)
        scores[:, 0] = 0.0
        check(backend, scores.tolist(), Bound(Policy(0.9, first=1), 6), chunk)


EXPIRING = Bound(Policy.parse("tova~6"), 3, window=6)


@pytest.mark.parametrize("chunk", [DECODE, 1, 128])
@pytest.mark.parametrize("above", [16, 100, 130])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_maximum_that_expired(backend: str, above: int, chunk: int) -> None:
    """What remains ranks by its own maximum: the first token, far above all others, falls out of the horizon."""
    scores = [[above + 0.0, -9.0, -8.0, -7.0, -1.0, 0.0, -130.0, -134.0]]
    assert oracle(scores, EXPIRING) == [4, 5, 6]
    check(backend, scores, EXPIRING, chunk)


@pytest.mark.parametrize(("above", "chunk"), [(130, DECODE), (70, 128)])
def test_a_maximum_that_expired_on_a_gpu(above: int, chunk: int, device: str) -> None:
    """There, the weights of a chunk are relative to what a row could have seen at its start: 147 below it they end."""
    far = 130.0 if chunk == DECODE else 70.0
    scores = [
        [above + 0.0, -9.0, -8.0, -7.0, -1.0, 0.0, -far, -far - 4.0],
        [0.0, -9.0, -8.0, -7.0, -1.0, 0.0, -far, -far - 4],
    ]
    assert oracle(scores, EXPIRING) == [4, 5, 6]
    check("triton", scores, EXPIRING, chunk, device)
