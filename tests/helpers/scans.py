"""Random chunks for scans, and a kernel compared with `scan_torch`."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from msrnn.backends.numba.scan import scan_numba
from msrnn.backends.torch import scan_torch
from msrnn.bound import Bound
from msrnn.policy import Policy
from tests.helpers.strategies import protected_ranges


@st.composite
def chunks(draw: st.DrawFn, rows: int) -> dict[str, Any]:
    size = draw(st.integers(1, 12))
    first = draw(st.integers(0, size - 1))
    recent = draw(st.integers(0, size - 1 - first))
    decay = draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
    value = decay is not None and draw(st.booleans())
    policy = Policy(decay, draw(st.sampled_from(["layer", "head"])), first, recent, value)
    bound = Bound(policy, size, draw(st.none() | st.integers(size + 2, 30)), draw(st.booleans()))
    return {
        "bound": bound,
        "protected": [draw(protected_ranges(bound)) for _ in range(2)],
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
    sinks = torch.randn(2, G, M, C, generator=draw) if case["sinks"] else None
    row_weight = torch.rand(position.shape, generator=draw) + 0.5 if bound.policy.weighs else None
    tensors = [scores, position, importance, query]
    protected = torch.tensor(case["protected"], dtype=torch.int32) if bound.protects and "protected" in case else None
    optional = (sinks, row_weight, protected)
    return [*(t.to(device) for t in tensors), bound, *(t if t is None else t.to(device) for t in optional)]


def check(kernel: Any, case: dict[str, Any], device: str) -> None:
    mine, theirs = arguments(case, device), arguments(case, device)
    evicted_at, expected = kernel(*mine), scan_torch(*theirs)
    assert torch.equal(evicted_at, expected)
    if kernel is scan_numba:
        torch.testing.assert_close(mine[0], theirs[0], atol=1e-5, rtol=1e-4)
    held: Tensor = (mine[1] >= 0) & (expected == expected.max())
    if case["bound"].policy.decay:
        torch.testing.assert_close(mine[2][held], theirs[2][held], atol=1e-5, rtol=1e-4)
