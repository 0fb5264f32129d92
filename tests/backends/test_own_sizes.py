"""Sequences of several sizes in one batch: each is read as in slots of its size alone, by every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend, resolve_scored_backend
from msrnn.bound import Bound
from msrnn.core.own_sizes import lower_bound, make_fewer
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.layer import attend
from msrnn.policy import Policy
from tests.helpers.layers import BACKENDS, random_tokens, read, shape_and_scoring
from tests.helpers.scored_policies import as_function

SIZES = [None, 9, 4, 12, 7]
LENGTH, MOST = 24, 13
BOUNDS = {
    "tova": Bound(Policy.parse("tova"), MOST),
    "window": Bound(Policy.parse("window+2"), MOST),
    "echo": Bound(Policy.parse("echo"), MOST),
    "head, recent share": Bound(Policy(0.9, "head", 1, 0.25), MOST),
    "random": Bound(Policy.parse("random"), MOST),
    "horizon": Bound(Policy.parse("tova~16"), MOST, window=16),
    "sliding": Bound(Policy.parse("tova"), MOST, window=18, sliding=True),
}
KERNEL_BOUNDS = ("echo", "head, recent share")  # for the interpreter, which is slow
KERNEL_CASE = "echo", 7  # in the interpreter; a GPU runs all of them
CASES = [
    pytest.param(name, how, chunk, marks=pytest.mark.slow if name == "triton" and (how, chunk) != KERNEL_CASE else ())
    for name in BACKENDS
    for how in BOUNDS
    for chunk in (7, 128)
    if name != "triton" or how in KERNEL_BOUNDS
]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr("msrnn.backends.triton.prefill.MOST", 16)


def make(count: int, shape: LayerShape, bound: Bound) -> Slots:
    slots = Slots(count, shape, bound)
    slots.protected[:, 0] = torch.tensor([3, 4])  # one token fits beside what the policies need at size 4
    return slots


def check(bound: Bound, shape: LayerShape, tokens: tuple[Tensor, ...], work: Any) -> None:
    together = make(len(SIZES), shape, bound)
    together.fewer.copy_(make_fewer(bound, SIZES))
    output, differs = work(together, tokens), False
    for i, size in enumerate(SIZES):
        own = bound if size is None else lower_bound(bound, size)
        assert together.bound_of(i) == own
        alone = make(1, shape, own)
        expected = work(alone, tuple(x[i : i + 1] for x in tokens))
        torch.testing.assert_close(output[i : i + 1], expected, atol=1e-5, rtol=1e-5)
        kept = [[set(row) - {-1} for row in slots.position[b].tolist()] for slots, b in ((together, i), (alone, 0))]
        assert kept[0] == kept[1]
        differs |= kept[0] != [set(row) - {-1} for row in together.position[0].tolist()]
    assert differs, "a test whose sizes make no difference shows nothing"


@pytest.mark.parametrize(("backend", "how", "chunk"), CASES)
def test_every_sequence_is_read_as_alone(backend: str, how: str, chunk: int, device: str) -> None:
    if device != "cpu" and backend == "numba":
        pytest.skip("its loops run on a CPU")
    shape, scoring = shape_and_scoring(device, sinks=how == "echo")
    tokens = random_tokens(len(SIZES), 4, 2, 18 if backend == "triton" else LENGTH, 16, device)
    steps = 3 if backend == "triton" else 9
    check(BOUNDS[how], shape, tokens, lambda slots, some: read(slots, some, scoring, backend, chunk, steps))


@pytest.mark.parametrize("backend", [b if b != "triton" else pytest.param(b, marks=pytest.mark.slow) for b in BACKENDS])
def test_tokens_that_move(backend: str, device: str) -> None:
    if device != "cpu" and backend == "numba":
        pytest.skip("its loops run on a CPU")
    apart = spacing("compressed")
    assert apart is not None
    rope = Rope(100.0 ** -(torch.arange(8.0, device=device) / 8))
    shape, scoring = shape_and_scoring(device, repositioning=Repositioning(apart, rope))
    tokens = random_tokens(len(SIZES), 4, 2, 20 if backend == "triton" else LENGTH, 16, device)
    check(BOUNDS["tova"], shape, tokens, lambda slots, some: read(slots, some, scoring, backend, 7, 3))


@pytest.mark.parametrize("policy", [Policy.parse("tova"), Policy(0.9, "head", 1, 0.25)])
def test_a_policy_with_a_function(policy: Policy) -> None:
    bound, backend = Bound(as_function(policy), MOST), resolve_scored_backend("auto")
    shape, scoring = shape_and_scoring("cpu")

    def work(slots: Slots, tokens: tuple[Tensor, ...]) -> Tensor:
        query, key, value = tokens
        return attend(slots, query, key, value, slots.advance(LENGTH, None), scoring, 7, backend)

    check(bound, shape, random_tokens(len(SIZES), 4, 2, LENGTH, 16, "cpu"), work)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chosen_sequences_have_their_own_sizes(backend: str, device: str) -> None:
    """Steps of sequences in another order than that of the slots."""
    if device != "cpu" and backend == "numba":
        pytest.skip("its loops run on a CPU")
    shape, scoring = shape_and_scoring(device)
    bound, computes = Bound(Policy.parse("tova"), 6), resolve_backend(backend, torch.device(device))
    sizes, chosen = [None, 4, 2], torch.tensor([2, 0], device=device)
    slots = Slots(3, shape, bound)
    alone = [Slots(1, shape, lower_bound(bound, sizes[i] or 6)) for i in chosen.tolist()]
    query, key, value = random_tokens(2, 4, 2, 10, 16, device)
    for t in range(10):
        q, k, v = query[:, :, t].unflatten(1, (2, 2)), key[:, :, t], value[:, :, t]
        position = torch.full((2,), t, dtype=torch.int32, device=device)
        output = computes.decode_chosen(slots, chosen, q, k, v, position, scoring)
        slots.fewer.copy_(make_fewer(bound, sizes))  # after the first step, which forgets what was there
        for i, own in enumerate(alone):
            here = slice(i, i + 1)
            one = computes.decode(own, q[here], k[here], v[here], position[:1], scoring)
            torch.testing.assert_close(output[i : i + 1], one, atol=1e-5, rtol=1e-5)
    held = [int((slots.position[i] >= 0).sum()) for i in range(3)]
    assert held == [6, 0, 2]


def test_a_scan_without_own_sizes_has_those_of_the_bound() -> None:
    shape, scoring = shape_and_scoring("cpu")
    tokens = random_tokens(1, 4, 2, LENGTH, 16, "cpu")
    plain, equal = (make(1, shape, BOUNDS["tova"]) for _ in range(2))
    equal.fewer.copy_(make_fewer(BOUNDS["tova"], [MOST]))
    outputs = [read(slots, tokens, Scoring(scoring.scale), "torch", 7) for slots in (plain, equal)]
    assert torch.equal(*outputs)
