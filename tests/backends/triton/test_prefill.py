"""The chunk's kernels against `TorchBackend.prefill`: the same eviction times, outputs, and slots afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends.torch import TorchBackend
from msrnn.backends.triton.prefill import prefill_triton
from msrnn.bound import Bound
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.slots import Slots
from msrnn.policy import Policy
from tests.helpers.bounds import CASES, protect_some
from tests.helpers.layers import shape_and_scoring
from tests.helpers.networks import add_network

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and small blocks are more of them."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("msrnn.backends.triton.prefill.MOST", 16)


def in_order(slots: Slots) -> list[Tensor]:
    """What is held, by position: the order of slots means nothing."""
    order = slots.position.argsort(-1)
    kept = slots.position.gather(-1, order)
    keys, values = (
        t.gather(2, order[..., None].expand(*t.shape)).masked_fill((kept < 0)[..., None], 0)
        for t in slots.dequantized()
    )
    numbers = (slots.importance, slots.row_weight)
    return [kept, keys, values, *(t.gather(-1, order).masked_fill(kept < 0, 0) for t in numbers if t is not None)]


def times(position: Tensor, evicted_at: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The last so many candidates in the order of the text, and when each left."""
    order = position.argsort(-1)[..., -width:]
    ordered = position.gather(-1, order)
    return ordered, evicted_at.gather(-1, order).masked_fill(ordered < 0, 0)


def check(
    device: str,
    bound: Bound,
    *sizes: Any,
    lengths: tuple[int, ...] = (9, 14),
    from_empty: bool = False,
    **options: Any,
) -> None:
    """Compare chunks of these lengths; unless `from_empty`, torch reads the first, since the interpreter is slow.

    Sizes and options are those of `shape_and_scoring`.
    """
    draw = torch.Generator().manual_seed(0)
    shape, scoring = shape_and_scoring(device, *sizes, **options)
    shape = add_network(shape, bound)
    heads, kv_heads, dim, dtype = shape.heads, shape.kv_heads, shape.key_dim, shape.dtype
    mine, theirs = Slots(2, shape, bound), Slots(2, shape, bound)
    exact = Slots(2, replace(shape, dtype=torch.float32), bound)
    for slots in (mine, theirs, exact):
        protect_some(slots)
    for number, length in enumerate(lengths):
        # As a model gives them: tokens before heads in memory.
        query, key, value = (
            torch.randn(2, length, h, dim, generator=draw).transpose(1, 2).to(device, dtype)
            for h in (heads, kv_heads, kv_heads)
        )
        real = torch.ones(2, length, dtype=torch.bool, device=device)
        real[0, : max(0, 3 - number)] = False
        tail = (mine.advance(length, real), scoring)
        by_torch = number == 0 and not from_empty
        output, position, evicted_at = (TorchBackend().prefill if by_torch else prefill_triton)(
            mine, query, key, value, *tail
        )
        reference = TorchBackend().prefill(theirs, query, key, value, *tail)
        truth = TorchBackend().prefill(exact, query.float(), key.float(), value.float(), *tail)
        for sorted_mine, sorted_exact in zip(in_order(mine), in_order(exact), strict=True):
            torch.testing.assert_close(sorted_mine.float(), sorted_exact.float(), atol=1e-4, rtol=1e-3)
        width = truth.position.shape[-1]  # slots that are empty may be left out
        for found, expected in zip(times(position, evicted_at, width), times(*truth[1:], width), strict=True):
            assert torch.equal(found, expected)
        rounding = torch.finfo(dtype).eps * truth.output.abs().max()
        allowed = 2 * (reference.output.float() - truth.output).abs().max() + rounding + 1e-5
        assert (output.float() - truth.output).abs().max() <= allowed
        assert (output[0, : max(0, 3 - number)] == 0).all()


@pytest.mark.parametrize("bound", CASES)
def test_policies(bound: Bound, device: str) -> None:
    check(device, bound)


@pytest.mark.parametrize("dim", [256, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (64, 80, 96, 128))])
def test_head_sizes(dim: int, device: str) -> None:
    check(device, Bound(Policy.parse("tova"), 5), dim=dim)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), pytest.param(16, 1, marks=pytest.mark.slow)])
def test_grouped_queries(heads: int, kv_heads: int, device: str) -> None:
    check(device, Bound(Policy.parse("h2o-layer"), 6), heads, kv_heads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    if (device, dtype) == ("cpu", torch.bfloat16):
        pytest.skip("triton's interpreter takes the bits of bfloat16 matrices for integers: this one needs a GPU")
    check(device, Bound(Policy.parse("tova"), 6), dim=80, dtype=dtype)


@pytest.mark.parametrize("code", STATE_DTYPES)
def test_eight_bits(code: str, device: str) -> None:
    check(device, Bound(Policy.parse("tova-head"), 6), state_dtype=STATE_DTYPES[code])


def test_softcap_and_sinks(device: str) -> None:
    check(device, Bound(Policy.parse("tova"), 6), softcap=2.0, sinks=True, from_empty=True)


@pytest.mark.parametrize("from_empty", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_more_than_one_block(from_empty: bool, device: str) -> None:
    check(device, Bound(Policy.parse("h2o-layer"), 20), lengths=(23, 18), from_empty=from_empty)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "heads"), [(512, 32), (1000, 5), (2048, 8)])
def test_wide_rows(size: int, heads: int) -> None:
    check("cuda", Bound(Policy.parse("tova"), size), heads, heads, 64, lengths=(171,) * 16)
