"""Attention of one new token: head sizes, groups, soft caps, sinks, and slots that are split among programs."""

from __future__ import annotations

import pytest
import torch

from msrnn.backends.triton.decode import decode_triton
from msrnn.bound import Bound
from msrnn.policy import Policy
from tests.helpers.decode_steps import but, check, layer

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dim", but([80, 256], [64, 80, 96, 128, 256]))
def test_head_sizes(dim: int, device: str) -> None:
    check(layer(device, Bound(Policy.parse("tova"), 5), dim=dim), steps=3, before=4)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), but([(3, 3), (6, 2), (32, 2)], [(3, 3), (4, 2), (6, 2), (16, 1), (32, 2)])
)
def test_grouped_queries(heads: int, kv_heads: int, device: str) -> None:
    check(layer(device, Bound(Policy.parse("h2o-layer"), 6), heads, kv_heads), steps=4, before=5)


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
