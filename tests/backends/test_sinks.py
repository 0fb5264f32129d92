"""Attention sinks that differ from query to query, and the share of attention that they take: every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend, resolve_scored_backend
from msrnn.backends.base import Backend
from msrnn.bound import Bound
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.policy import Policy
from tests.helpers.decode_steps import but
from tests.helpers.layers import held, random_tokens
from tests.helpers.scored_policies import as_function
from tests.helpers.shards import run_in_turns
from tests.helpers.sinks import Attended, define, read_with_sinks

pytestmark = pytest.mark.usefixtures("poisoned", "narrow")

B, H, K, DIM, T = 2, 4, 2, 16, 12
PIECES = (5, 5, 1, 1)
FREQUENCY = 10_000.0 ** -(torch.arange(8, dtype=torch.float32) / 8)
BOUNDS = {
    "tova": Bound(Policy.parse("tova"), 4),
    "echo+1~8": Bound(Policy.parse("echo+1~8"), 5, window=8),
    "h2o": Bound(Policy.parse("h2o"), 4),
    "window": Bound(Policy.parse("window"), 3),
}
every_backend = pytest.mark.parametrize("name", ["torch", "numba", "triton", "scored"])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and small blocks are more of them."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("msrnn.backends.triton.prefill.MOST", 16)


def choose(name: str, bound: Bound, device: str) -> tuple[Backend, Bound]:
    if name == "numba" and device != "cpu":
        pytest.skip("numba runs on a CPU")
    if name == "scored":
        return resolve_scored_backend("torch"), replace(bound, policy=as_function(bound.policy))
    return resolve_backend(name, torch.device(device)), bound


def random_sinks(device: str) -> Tensor:
    """[B, H, T]: some queries have no sink, and some sinks are far above or below every score."""
    draw = torch.Generator().manual_seed(7)
    sinks = torch.randn(B, H, T, generator=draw) * 3
    sinks[torch.rand(B, H, T, generator=draw) < 0.2] = -torch.inf
    for number, t in ((60.0, 5), (-60.0, 6), (1e30, 7), (-1e30, 8), (60.0, 10), (-60.0, 11)):
        sinks[:, 1, t] = number
    return sinks.to(device)


def real_tokens(device: str) -> Tensor:
    """Padding before the text, and at a decode step."""
    real = torch.ones(B, T, dtype=torch.bool, device=device)
    real[0, :3], real[0, T - 1] = False, False
    return real


def attend(
    name: str,
    bound: Bound,
    device: str,
    scoring: Scoring,
    pieces: tuple[int, ...] = PIECES,
    state_dtype: torch.dtype | None = None,
) -> tuple[Attended, Slots]:
    backend, bound = choose(name, bound, device)
    slots = Slots(B, LayerShape(H, K, DIM, DIM, torch.float32, torch.device(device), state_dtype), bound)
    tokens = random_tokens(B, H, K, T, DIM, device)
    return read_with_sinks(backend, slots, tokens, real_tokens(device), scoring, pieces), slots


def assert_same(found: tuple[Attended, Slots], expected: tuple[Attended, Slots]) -> None:
    for mine, other in zip((*found[0], *held(found[1])), (*expected[0], *held(expected[1])), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    assert_same_share(found[0].share, expected[0].share)


def assert_same_share(found: Tensor, expected: Tensor) -> None:
    """Tiny shares, too, which the difference of 1 and a sum would round to nothing."""
    torch.testing.assert_close(found, expected, atol=1e-35, rtol=1e-4)


@every_backend
@pytest.mark.parametrize(
    ("policy", "softcap"),
    but(
        [("tova", None), ("echo+1~8", None), ("window", 2.0)],
        [("tova", None), ("echo+1~8", None), ("h2o", 2.0), ("window", None), ("window", 2.0)],
    ),
)
def test_each_query_has_a_sink_of_its_own(name: str, policy: str, softcap: float | None, device: str) -> None:
    bound = BOUNDS[policy]
    sinks, real = random_sinks(device), real_tokens(device)
    scoring = Scoring(0.5, softcap, sinks)
    (output, share), slots = attend(name, bound, device, scoring)
    for b in range(B):
        query, key, value, own = (x[b, :, real[b]].cpu() for x in (*random_tokens(B, H, K, T, DIM, device), sinks))
        expected, expected_share, kept = define(query, key, value, own, bound, scoring)
        torch.testing.assert_close(output[b, real[b]].cpu(), expected.float(), atol=1e-5, rtol=1e-4)
        assert_same_share(share[b, :, real[b]].cpu(), expected_share.float())
        assert [sorted(j for j in group if j >= 0) for group in slots.position[b].tolist()] == kept
        assert (share[b, :, ~real[b]] == 0).all()
        assert (output[b, ~real[b]] == 0).all()


@every_backend
@pytest.mark.parametrize("policy", ["tova", pytest.param("window", marks=pytest.mark.slow)])
def test_no_sink_for_any_query_is_a_layer_without_sinks(name: str, policy: str, device: str) -> None:
    bound = BOUNDS[policy]
    none = torch.full((B, H, T), -torch.inf, device=device)
    (output, share), slots = attend(name, bound, device, Scoring(0.5, sinks=none))
    (expected, expected_share), others = attend(name, bound, device, Scoring(0.5))
    assert torch.equal(output, expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(held(slots), held(others), strict=True))
    assert (share == 0).all()
    assert (expected_share == 0).all()


@every_backend
@pytest.mark.parametrize("policy", ["tova", pytest.param("window", marks=pytest.mark.slow)])
def test_the_same_sink_for_every_query_is_a_learned_sink(name: str, policy: str, device: str) -> None:
    bound = BOUNDS[policy]
    learned = torch.linspace(-1, 2, H, device=device)
    (output, share), slots = attend(name, bound, device, Scoring(0.5, sinks=learned))
    expanded = learned[:, None].expand(B, H, T).contiguous()
    (expected, expected_share), others = attend(name, bound, device, Scoring(0.5, sinks=expanded))
    assert torch.equal(output, expected)
    assert torch.equal(share, expected_share)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(held(slots), held(others), strict=True))
    real = real_tokens(device)[:, None].expand(share.shape)
    assert (share[real] > 0).all()


@every_backend
@pytest.mark.parametrize("policy", ["tova", pytest.param("window", marks=pytest.mark.slow)])
def test_rows_of_the_caller_take_part_through_a_sink(name: str, policy: str, device: str) -> None:
    """Held rows, and further rows whose log-sum-exp is the sink: one softmax over all of them."""
    tokens = random_tokens(B, H, K, T, DIM, device)
    key, value = random_tokens(B, K, K, 6, DIM, device, seed=1)[:2]
    scoring = Scoring(0.5, softcap=5.0)
    scores = scoring(tokens[0].reshape(B, K, -1, DIM), key).view(B, H, T, 6)
    sinks = replace(scoring, sinks=scores.logsumexp(-1))
    (output, share), _ = attend(name, Bound(Policy.parse(policy), T), device, sinks)
    further = scores.softmax(-1) @ value.repeat_interleave(H // K, 1)
    found = output + (share[..., None] * further).transpose(1, 2)

    real = real_tokens(device)
    seen = real[:, None, None] & torch.ones(T, T, dtype=torch.bool, device=device).tril()
    own = scoring(tokens[0].reshape(B, K, -1, DIM), tokens[1]).view(B, H, T, T).masked_fill(~seen, -torch.inf)
    values = torch.cat([tokens[2], value], dim=2).repeat_interleave(H // K, 1)
    expected = (torch.cat([own, scores], dim=-1).softmax(-1) @ values).transpose(1, 2)
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-4)
    assert (found[~real] == 0).all()


@pytest.mark.parametrize("code", STATE_DTYPES)
@pytest.mark.parametrize("name", ["numba", "triton"])
def test_quantized_states(name: str, code: str, device: str) -> None:
    # Triton's interpreter loses the carry when it rounds to float8, which a decode step does.
    pieces = (5, 7) if (device, code) == ("cpu", "fp8") else PIECES
    given: Any = (BOUNDS["tova"], device, Scoring(0.5, sinks=random_sinks(device)), pieces, STATE_DTYPES[code])
    assert_same(attend(name, *given), attend("torch", *given))


def reposition(kind: str, device: str) -> Repositioning:
    apart = spacing(kind)
    assert apart is not None
    return Repositioning(apart, Rope(FREQUENCY.to(device)))


@pytest.mark.parametrize("name", but(["torch", "numba", "scored"], ["torch", "numba", "triton", "scored"]))
def test_keys_that_are_rerotated_by_nothing(name: str, device: str) -> None:
    """No gap is so wide that it is compressed, so a layer is the same as without repositioning."""
    scoring, bound = Scoring(0.5, None, random_sinks(device)), BOUNDS["h2o"]
    same = replace(scoring, repositioning=reposition("compressed:30", device))
    found, expected = (attend(name, bound, device, each)[0] for each in (same, scoring))
    torch.testing.assert_close(found.output, expected.output, atol=1e-5, rtol=1e-4)
    assert_same_share(found.share, expected.share)


@pytest.mark.parametrize("name", ["numba", "triton"])
def test_keys_that_are_rerotated(name: str, device: str) -> None:
    given: Any = (BOUNDS["tova"], device, Scoring(0.5, None, random_sinks(device), reposition("compact", device)))
    assert_same(attend(name, *given), attend("torch", *given))


@pytest.mark.parametrize(
    ("name", "compact"),
    but(
        [("torch", False), ("numba", True)],
        [("torch", False), ("torch", True), ("numba", False), ("numba", True), ("triton", False)],
    ),
)
def test_heads_that_processes_share(name: str, compact: bool, device: str) -> None:
    """Two processes with half of the heads each evict and share as one with all of them."""
    repositioning = reposition("compact", device) if compact else None
    scoring, bound = Scoring(0.5, None, random_sinks(device), repositioning), BOUNDS["tova"]
    (output, share), slots = attend(name, bound, device, scoring)
    tokens, backend = random_tokens(B, H, K, T, DIM, device), choose(name, bound, device)[0]

    def read_half(shards: Any) -> tuple[Attended, Slots]:
        own = Slots(B, LayerShape(H // 2, K // 2, DIM, DIM, torch.float32, torch.device(device)), bound)
        own.shards = shards
        parts = [x.chunk(2, 1)[shards.rank] for x in (*tokens, random_sinks(device))]
        half = replace(scoring, sinks=parts[3])
        return read_with_sinks(backend, own, parts[:3], real_tokens(device), half, PIECES), own

    halves = run_in_turns(2, read_half)
    torch.testing.assert_close(torch.cat([half.output for half, _ in halves], dim=2), output, atol=1e-5, rtol=1e-4)
    assert_same_share(torch.cat([half.share for half, _ in halves], dim=1), share)
    for _, own in halves:
        assert torch.equal(own.position.sort(-1).values, slots.position.sort(-1).values)
