from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from msrnn.backends.triton.common import BYTES, LEAST, at_once, cap_scores, lift_exp, width


@triton.jit  # type: ignore[untyped-decorator]
def numbers_kernel(x, lifted, capped, uncapped, N: tl.constexpr):  # type: ignore[no-untyped-def]
    o_n = tl.arange(0, N)
    b_x = tl.load(x + o_n)
    tl.store(lifted + o_n, lift_exp(b_x))
    tl.store(capped + o_n, cap_scores(b_x, 30.0))
    tl.store(uncapped + o_n, cap_scores(b_x, None))


def test_exponentials_and_soft_caps(device: str) -> None:
    """The exponential stays a normal number where that of float32 has ended."""
    x = torch.linspace(-140, 0, 64, device=device)
    lifted, capped, uncapped = (torch.empty_like(x) for _ in range(3))
    launch: Any = numbers_kernel[(1,)]
    launch(x, lifted, capped, uncapped, N=64)
    exact = x.double()
    torch.testing.assert_close(lifted.double(), exact.exp() * 2.0**86, rtol=2e-5, atol=0)
    torch.testing.assert_close(capped.double(), 30 * (exact / 30).tanh(), rtol=1e-5, atol=1e-5)
    assert torch.equal(uncapped, x)


@pytest.mark.parametrize(("n", "expected"), [(1, LEAST), (16, 16), (17, 32), (100, 128)])
def test_widths_are_powers_of_two(n: int, expected: int) -> None:
    assert width(n) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dim", [8, 80, 256, 1024])
def test_rows_at_once_fit_into_shared_memory(dim: int, dtype: torch.dtype) -> None:
    rows = at_once(64, dim, dtype)
    assert LEAST <= rows <= 64
    assert rows == LEAST or rows * width(dim) * dtype.itemsize <= BYTES
