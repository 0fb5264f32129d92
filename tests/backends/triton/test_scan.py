"""`scan_triton` against `scan_torch`: the same eviction times and importances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from msrnn.backends.torch import scan_torch
from msrnn.backends.triton import scan
from msrnn.bound import Bound
from msrnn.policy import Policy
from tests.helpers.scans import arguments, check, chunks
from tests.helpers.weights import scan_by_weights

FEW = settings(max_examples=3, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(case=chunks(rows=8))
def test_the_triton_kernel(case: dict[str, Any], device: str) -> None:
    check(scan_by_weights, case, device)


@pytest.mark.parametrize(("rounds", "length"), [(1, 64), (2, 3), (1, 5), (9, 4), (3, 1)])
@FEW
@given(case=chunks(rows=8))
def test_rounds(rounds: int, length: int, case: dict[str, Any], device: str) -> None:
    """All, some, or no slices of a chunk are settled when the last round is over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "pays", lambda *_: True)
        patch.setattr(scan, "SLICE", length)
        patch.setattr(scan, "ROUNDS", rounds)
        check(scan_by_weights, case, device)


def draw_case(tokens: int, policy: Policy) -> dict[str, Any]:
    case = {"heads": 8, "new": tokens, "held": 20, "padding": 2, "sinks": False, "seed": 5}
    return {**case, "bound": Bound(policy, 20)}


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_rounds_of_sequences_with_sizes_of_their_own(
    decay: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "pays", lambda *_: True)
    monkeypatch.setattr(scan, "SLICE", 5)
    fewer = torch.tensor([[3, 0], [9, 0]], dtype=torch.int32, device=device)
    case = {**draw_case(16, Policy(decay)), "held": 10}
    mine, theirs = [*arguments(case, device), fewer], [*arguments(case, device), None, fewer]
    assert torch.equal(scan_by_weights(*mine), scan_torch(*theirs))


@pytest.mark.parametrize("policy", [Policy(0.0), Policy(0.9, value_norm=True), Policy(1.0, recent=0.5)], ids=str)
def test_rounds_settle_a_chunk(policy: Policy, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights, which would be walked through then, are not read again."""
    kernel, walked = scan.scan_kernel, list[Any]()

    class Spoiled:
        """Walks through weights that are no numbers, so that evictions are wrong unless a round has found them."""

        def __getitem__(self, grid: Any) -> Any:
            def run(weights: Any, *args: Any, **kwargs: Any) -> Any:
                walked.append(weights is not None)
                return kernel[grid](None if weights is None else weights.fill_(torch.nan), *args, **kwargs)

            return run

    monkeypatch.setattr(scan, "scan_kernel", Spoiled())
    monkeypatch.setattr(scan, "SLICE", 64)
    monkeypatch.setattr(scan, "ROUNDS", 12)
    check(scan_by_weights, draw_case(32, policy), device)
    assert walked == [False] * 12 + [True]


def test_rows_that_do_not_fit_into_shared_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.backends.triton.scan._shared_memory", lambda _: 0)
    monkeypatch.setattr("msrnn.backends.triton.scan.TILE", 64)
    case = {"heads": 5, "new": 8, "held": 12, "padding": 1, "sinks": True, "seed": 3}
    check(scan_by_weights, {**case, "bound": Bound(Policy(0.5), 12)}, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "heads"), [(512, 32), (1000, 5), (4096, 8)])
def test_wide_rows(size: int, heads: int) -> None:
    case = {"heads": heads, "new": 128, "held": size, "padding": 3, "sinks": False, "seed": 1}
    check(scan_by_weights, {**case, "bound": Bound(Policy(0.0), size)}, "cuda")
