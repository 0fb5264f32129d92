"""Every decode kernel against `TorchBackend.decode`: the same evictions, and at most twice its error against float32.

A rounding of the result comes on top: triton's interpreter cuts digits off where a GPU rounds.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from msrnn.backends import resolve_backend
from msrnn.backends.torch import TorchBackend
from msrnn.bound import Bound
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.layer import attend
from msrnn.policy import Policy
from tests.helpers.decode_steps import but, check, layer

pytestmark = pytest.mark.usefixtures("poisoned")


def placed(positions: str, device: str) -> Repositioning | None:
    apart, frequency = spacing(positions), 100.0 ** -(torch.arange(8, device=device) / 8)
    return Repositioning(apart, Rope(frequency.float())) if apart else None


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
    ("compressed:3", 4, False, 4, Bound(Policy.parse("tova+2~9"), 6, window=9)),
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
    run = layer(device, bound, heads, repositioning=Repositioning(apart, rope), sinks=heads == 2)
    check(run, steps=5, before=bound.size - 1)


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
