"""Every decode kernel against `TorchBackend.decode`: the same evictions, and at most twice its error against float32.

A rounding of the result comes on top: triton's interpreter cuts digits off where a GPU rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend
from msrnn.backends.torch import TorchBackend
from msrnn.backends.triton.decode import decode_triton
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.layer import attend
from msrnn.policy import Bound, Policy
from tests.helpers.bounds import CASES
from tests.helpers.layers import shape_and_scoring

pytestmark = pytest.mark.usefixtures("poisoned")
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
        self.bound, self.shape, self.scoring = bound, shape, scoring
        self.slots = Slots(batch, shape, bound)

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
        output = decode_triton(run.slots, *given)
        reference = TorchBackend().decode(theirs, *given)
        truth = TorchBackend().decode(exact, query.float(), key.float(), value.float(), position, run.scoring)
        if real is not None:
            assert (output[0] == 0).all()
        rounding = torch.finfo(run.shape.dtype).eps * truth.abs().max()
        allowed = 2 * (reference.float() - truth).abs().max() + rounding + 1e-5
        assert (output.float() - truth).abs().max() <= allowed
        assert torch.equal(run.slots.position, exact.position), "another token left than in float32"
        if run.shape.state_dtype is not None:
            empty = (exact.position < 0)[..., None]
            for mine, expected in zip(run.slots.dequantized(), theirs.dequantized(), strict=True):
                same = torch.equal(mine.masked_fill(empty, 0), expected.masked_fill(empty, 0))
                assert same, "rounded otherwise than by `encode`"
        if run.slots.importance is not None and exact.importance is not None:
            held = exact.position >= 0
            torch.testing.assert_close(run.slots.importance[held], exact.importance[held], atol=1e-4, rtol=1e-3)


def layer(device: str, bound: Bound, *heads: Any, **options: Any) -> Run:
    shape, scoring = shape_and_scoring(device, *heads, **options)
    return Run(bound, shape, 2, scoring)


def placed(positions: str, device: str) -> Repositioning | None:
    apart, frequency = spacing(positions), 100.0 ** -(torch.arange(8, device=device) / 8)
    return Repositioning(apart, Rope(frequency.float())) if apart else None


@pytest.mark.parametrize("bound", CASES)
def test_policies(bound: Bound, device: str) -> None:
    check(layer(device, bound), steps=5, before=bound.size + 3)


@pytest.mark.parametrize("dim", but([80, 256], [64, 80, 96, 128, 256]))
def test_head_sizes(dim: int, device: str) -> None:
    check(layer(device, Bound(Policy.parse("tova"), 5), dim=dim), steps=3, before=4)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), but([(3, 3), (6, 2), (32, 2)], [(3, 3), (4, 2), (6, 2), (16, 1), (32, 2)])
)
def test_grouped_queries(heads: int, kv_heads: int, device: str) -> None:
    check(layer(device, Bound(Policy.parse("h2o-layer"), 6), heads, kv_heads), steps=4, before=5)


HALVES = product([torch.bfloat16, torch.float16], [2, 6], ["original", "compressed"])


@pytest.mark.parametrize(
    ("dtype", "heads", "positions"), but([(torch.bfloat16, 2, "original"), (torch.float16, 6, "compressed")], HALVES)
)
def test_half_precision(dtype: torch.dtype, heads: int, positions: str, device: str) -> None:
    if (device, dtype, heads) == ("cpu", torch.bfloat16, 6):
        pytest.skip("triton's interpreter takes the bits of bfloat16 matrices for integers: this one needs a GPU")
    run = layer(device, Bound(Policy.parse("tova"), 6), heads, dtype=dtype, repositioning=placed(positions, device))
    check(run, steps=5, before=5)


PLACES: list[tuple[Any, int, bool, int, Bound]] = [  # positions, pairs, interleaved, query heads, bound
    ("compressed", 8, False, 2, Bound(Policy.parse("tova+1"), 6)),
    ("compact", 8, True, 6, Bound(Policy(0.9, "head", 1, 2), 6, window=40)),
    ("compressed:sqrt", 4, False, 4, Bound(Policy.parse("echo+1"), 7)),
    ("compressed:3", 4, False, 4, Bound(Policy.parse("tova+2~9"), 6, window=9, spared=2)),
    ("compressed:ln", 3, True, 2, Bound(Policy.parse("window+2"), 5)),
    (lambda gap: gap**0.5, 6, False, 4, Bound(Policy.parse("h2o"), 6)),
    ("compressed", 6, False, 2, Bound(Policy.parse("tova-head"), 17)),
]


@pytest.mark.parametrize(
    ("positions", "pairs", "interleaved", "heads", "bound"), but([PLACES[i] for i in (0, 1, 3, 5)], PLACES)
)
def test_positions(positions: Any, pairs: int, interleaved: bool, heads: int, bound: Bound, device: str) -> None:
    apart = spacing(positions)
    assert apart is not None
    frequency = 100.0 ** -(torch.arange(pairs, device=device) / pairs)
    rope = Rope(frequency.float(), 16 - 2 * pairs if interleaved else 0, interleaved)
    check(layer(device, bound, heads, repositioning=Repositioning(apart, rope)), steps=5, before=bound.size - 1)


def test_a_block_of_tokens_that_move(device: str) -> None:
    apart = spacing("compressed")
    assert apart is not None
    repositioning = Repositioning(apart, Rope(100.0 ** -(torch.arange(4.0, device=device) / 4)))
    run = layer(device, Bound(Policy.parse("tova+1"), 4), dim=8, repositioning=repositioning)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 7, 8, generator=draw).to(device) for n in (4, 2, 2))
    real = torch.arange(7, device=device) >= torch.tensor([[0], [2]], device=device)
    mine, theirs = run.copy(), run.copy()
    output, expected = (
        attend(slots, query, key, value, slots.advance(7, real), run.scoring, 128, backend)
        for slots, backend in ((mine, resolve_backend("triton", query.device)), (theirs, TorchBackend()))
    )
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(mine.position.sort(-1).values, theirs.position.sort(-1).values)


@pytest.mark.parametrize(
    ("code", "heads", "positions"),
    but([("int8", 6, "compressed")], product(STATE_DTYPES, [2, 6], ["original", "compressed"])),
)
def test_eight_bits(code: str, heads: int, positions: str, device: str) -> None:
    if (device, code) == ("cpu", "fp8"):
        pytest.skip("triton's interpreter loses the carry when it rounds to float8: this one needs a GPU")
    check(
        layer(
            device,
            Bound(Policy.parse("h2o"), 6),
            heads,
            state_dtype=STATE_DTYPES[code],
            repositioning=placed(positions, device),
        ),
        steps=5,
        before=5,
    )


@pytest.mark.parametrize("programs", but([12], [4, 12, 4096]))
def test_slots_are_split_among_programs(programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.backends.triton.decode.PROGRAMS", programs)
    run = layer(device, Bound(Policy.parse("tova"), 100), heads=6, sinks=True)
    run.slots.keys.normal_(generator=torch.Generator(device).manual_seed(3))
    run.slots.values.normal_(generator=torch.Generator(device).manual_seed(4))
    run.slots.position[..., :100] = torch.arange(100, dtype=torch.int32)
    run.slots.seen.fill_(100)
    check(run, steps=4)


def test_softcap_and_sinks(device: str) -> None:
    check(layer(device, Bound(Policy.parse("tova"), 6), softcap=2.0, sinks=True), steps=4, before=4)


def test_what_lies_in_an_empty_slot_does_not_matter(device: str) -> None:
    run = layer(device, Bound(Policy.parse("tova"), 6))
    run.slots.keys.fill_(torch.nan)
    run.slots.values.fill_(torch.nan)
    for _ in range(3):
        query, key, value = run.inputs(torch.Generator().manual_seed(1))
        position = run.slots.advance(1, None)[:, 0]
        output = decode_triton(run.slots, query, key, value, position, run.scoring)
        assert output.isfinite().all()


@pytest.mark.parametrize("size", but([33], [33, 64, 100]))
def test_states_that_fill_several_blocks(size: int, device: str) -> None:
    """Keys grow along the slots, so that every block raises the maximum of the ones before it."""
    run = layer(device, Bound(Policy.parse("h2o-layer"), size), heads=6)
    slots, draw = run.slots, torch.Generator().manual_seed(2)
    growing = torch.linspace(0.1, 4, size + 1)[:, None]
    slots.keys.copy_(torch.randn(slots.keys.shape, generator=draw) * growing)
    slots.values.copy_(torch.randn(slots.values.shape, generator=draw))
    slots.position[..., :size] = torch.arange(size, dtype=torch.int32)
    assert slots.importance is not None
    slots.importance.copy_(torch.rand(slots.importance.shape, generator=draw))
    slots.seen.fill_(size)
    check(run, steps=3)
