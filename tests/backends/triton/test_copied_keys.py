"""Queries as two bytes per number: nearer than bfloat16 is, for numbers of any size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msrnn.backends.triton.copied_keys import split_queries, splits_queries

ROWS, DIM = 16, 32


@triton.jit  # type: ignore[untyped-decorator]
def split_kernel(query, whole, scales, ROWS: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    o_q, o_d = tl.arange(0, ROWS), tl.arange(0, DIM)
    o_all = o_q[:, None] * DIM + o_d[None, :]
    b_high, b_low, b_scale = split_queries(tl.load(query + o_all))
    tl.store(whole + o_all, b_high.to(tl.int32) * 256 + b_low.to(tl.int32))
    tl.store(scales + o_q, b_scale)


def test_two_bytes_of_each_number(device: str) -> None:
    query = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)).to(device)
    query *= 10.0 ** torch.arange(-8, 8, device=device)[:, None]
    query[3] = 0
    query[4, 1:] = 0  # 127 · 256 steps, the most
    whole, scales = torch.empty(ROWS, DIM, dtype=torch.int32, device=device), torch.empty(ROWS, device=device)
    split_kernel[(1,)](query, whole, scales, ROWS=ROWS, DIM=DIM)
    error = (whole * scales[:, None] - query).abs().amax(1)
    assert (error <= query.abs().amax(1) / (127 * 256) * 0.501).all()


def test_which_queries_are_split() -> None:
    assert splits_queries(torch.zeros(1, 2, 1, 32, dtype=torch.bfloat16))
    assert not splits_queries(torch.zeros(1, 2, 1, 32))
    assert not splits_queries(torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16))
