"""Every scan kernel against `scan_torch`: the same eviction times and importances, and attention where it gives it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrnn.backends.numba.scan import scan_numba
from msrnn.backends.torch import scan_torch
from msrnn.core.slots import HELD
from msrnn.policy import Bound, Policy
from tests.helpers.weights import scan_by_weights


@st.composite
def chunks(draw: st.DrawFn, rows: int) -> dict[str, Any]:
    size = draw(st.integers(1, 12))
    first = draw(st.integers(0, size - 1))
    recent = draw(st.integers(0, size - 1 - first))
    decay = draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
    value = decay is not None and draw(st.booleans())
    policy = Policy(decay, draw(st.sampled_from(["layer", "head"])), first, recent, value)
    return {
        "bound": Bound(policy, size, draw(st.none() | st.integers(size + 2, 30))),
        "heads": draw(st.integers(1, 5)),
        "new": draw(st.integers(1, rows)),
        "held": draw(st.integers(0, size)),
        "padding": draw(st.integers(0, 3)),
        "sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def arguments(case: dict[str, Any], device: str) -> list[Any]:
    """Slots in which some tokens lie in any order, then new tokens, the first of one row padding."""
    bound, M, C, held = case["bound"], case["heads"], case["new"], case["held"]
    G = bound.groups(2)
    draw = torch.Generator().manual_seed(case["seed"])
    slots = torch.full((2, G, bound.slots), -1, dtype=torch.int32)
    for b in range(2):
        for g in range(G):
            where = torch.randperm(bound.slots, generator=draw)[:held]
            slots[b, g, where] = torch.randperm(held, generator=draw).to(torch.int32)
    real = torch.ones(2, C, dtype=torch.bool)
    real[0, : case["padding"]] = False
    query = (held + real.cumsum(-1) - 1).masked_fill(~real, -1).to(torch.int32)
    position = torch.cat([slots, query[:, None].expand(2, G, C)], dim=-1)
    scores = torch.randn(2, G, M, C, bound.slots + C, generator=draw) * 3
    importance = torch.rand(position.shape, generator=draw) * (position >= 0)
    importance[..., bound.slots :] = 0
    sinks = torch.randn(G, M, generator=draw) if case["sinks"] else None
    norm = torch.rand(position.shape, generator=draw) + 0.5 if bound.policy.value_norm else None
    tensors = [scores, position, importance, query]
    return [*(t.to(device) for t in tensors), bound, *(t if t is None else t.to(device) for t in (sinks, norm))]


def check(kernel: Any, case: dict[str, Any], device: str) -> None:
    mine, theirs = arguments(case, device), arguments(case, device)
    evicted_at, expected = kernel(*mine), scan_torch(*theirs)
    assert torch.equal(evicted_at, expected)
    if kernel is scan_numba:
        torch.testing.assert_close(mine[0], theirs[0], atol=1e-5, rtol=1e-4)
    held: Tensor = (mine[1] >= 0) & (expected == expected.max())
    if case["bound"].policy.decay:
        torch.testing.assert_close(mine[2][held], theirs[2][held], atol=1e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=chunks(rows=20))
def test_the_compiled_loop(case: dict[str, Any]) -> None:
    check(scan_numba, case, "cpu")


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=chunks(rows=8))
def test_the_triton_kernel(case: dict[str, Any], device: str) -> None:
    check(scan_by_weights, case, device)


def test_rows_that_do_not_fit_into_shared_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.backends.triton.scan._shared_memory", lambda _: 0)
    monkeypatch.setattr("msrnn.backends.triton.scan.TILE", 64)
    case = {"heads": 5, "new": 8, "held": 12, "padding": 1, "sinks": True, "seed": 3}
    check(scan_by_weights, {**case, "bound": Bound(Policy(0.5), 12)}, device)


@pytest.mark.parametrize("number", [math.nan, -math.nan], ids=["nan", "-nan"])
@pytest.mark.parametrize("kernel", [scan_torch, scan_numba, scan_by_weights])
def test_an_importance_that_is_nan_counts_as_infinity(kernel: Any, number: float, device: str) -> None:
    """The bits of a NaN with a sign are those of a negative integer, which would sort below every importance."""
    if kernel is scan_numba and device != "cpu":
        pytest.skip("this one runs on a CPU")
    case = {"heads": 2, "new": 2, "held": 4, "padding": 0, "sinks": False, "seed": 5}
    given = arguments({**case, "bound": Bound(Policy(1.0), 4)}, device)
    position, importance = given[1], given[2]
    importance[(position == 0) | (position == 1)] = number
    evicted_at = kernel(*given)
    assert (evicted_at[(position == 0) | (position == 1)] == HELD).all()
    assert ((position >= 0) & (evicted_at == HELD)).sum(-1).eq(4).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "heads"), [(512, 32), (1000, 5), (4096, 8)])
def test_wide_rows(size: int, heads: int) -> None:
    case = {"heads": heads, "new": 128, "held": size, "padding": 3, "sinks": False, "seed": 1}
    check(scan_by_weights, {**case, "bound": Bound(Policy(0.0), size)}, "cuda")
