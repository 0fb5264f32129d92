"""The kernels of recall against plain torch: the same guests, the same 8-bit keys, the same outputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend
from msrnn.bound import Bound
from msrnn.core import paged_slots
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape
from msrnn.policy import Policy
from msrnn.recall import SEGMENT, Recall, Recalling
from msrnn.recall_layer import attend_recalling
from tests.helpers.decode_steps import but

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 32, 20
SCORING = Scoring(0.5, 30.0)


def pair(
    device: str, policy: str = "tova", batch: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[RecallSlots, PagedSlots]:
    """Slots for plain torch, and for kernels."""
    shape = LayerShape(HEADS, KV_HEADS, DIM, VALUE_DIM, dtype, torch.device(device), reach=20)
    bound = Bound(Policy.parse(policy), 12, recall=Recall(8, search="int8", **options))
    return RecallSlots(batch, shape, bound), PagedSlots(batch, replace(shape, paged=True), bound)


@pytest.fixture(autouse=True)
def one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches rank as few segments as there are: the interpreter is slow."""
    monkeypatch.setattr(paged_slots, "LEAST_SEGMENTS", 1)


def draw(device: str, length: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, HEADS, length, DIM, generator=generator) * 2
    key, value = (torch.randn(batch, KV_HEADS, length, dim, generator=generator) for dim in (DIM, VALUE_DIM))
    return query.to(device), key.to(device), value.to(device)


def repositioned(device: str) -> Scoring:
    spaced = spacing("compressed:3")
    assert spaced is not None
    rope = Rope((10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))).to(device))
    return replace(SCORING, repositioning=Repositioning(spaced, rope))


def read(
    slots: RecallSlots,
    rows: tuple[Tensor, ...],
    begin: int,
    end: int,
    recalling: Recalling | None,
    real: Any = None,
    scoring: Scoring = SCORING,
) -> Tensor:
    backend = "triton" if isinstance(slots, PagedSlots) else "torch"
    own = resolve_backend(backend, slots.seen.device)
    slots.reserve(end - begin)
    position = slots.advance(end - begin, real)
    query, key, value = (x[:, :, begin:end] for x in rows)
    rest: Any = scoring, 64, own, None, real, recalling
    return attend_recalling(slots, query, key, value, position, *rest)


def guests_of(slots: RecallSlots) -> list[set[int]]:
    return [set(head.tolist()) - {-1} for head in slots.guest_position.flatten(0, 1)]


@pytest.mark.parametrize(
    ("policy", "place", "positions"),
    but(
        [("h2o", "host", "original"), ("tova", "host", "repositioned")],
        product(["tova", "h2o", "window+2"], ["host", "device"], ["original", "repositioned"]),
    ),
)
def test_blocks_and_steps(policy: str, place: str, positions: str, device: str) -> None:
    both, rows = pair(device, policy, archive=place), draw(device, 40)
    scoring = SCORING if positions == "original" else repositioned(device)
    for begin, end, recalling in (
        (0, 29, None),
        (29, 33, Recalling(4, starts=True)),
        (33, 34, Recalling(1, starts=False)),
        (34, 35, Recalling(1, starts=True)),
        (35, 40, None),
    ):
        outputs = [read(slots, rows, begin, end, recalling, scoring=scoring) for slots in both]
        torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
        assert guests_of(both[0]) == guests_of(both[1])
        assert bool(guests_of(both[0])[0]) == (recalling is not None)
    both[1].settle()
    plain, paged = ([*slots.archives[0].keys_to_search()] for slots in both)
    for (_, mine), (_, theirs) in zip(plain, paged, strict=True):
        assert torch.equal(mine.codes, theirs.codes)
        assert mine.scale is not None
        assert theirs.scale is not None
        assert torch.equal(mine.scale, theirs.scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steps_of_16_bit_models(dtype: torch.dtype, device: str) -> None:
    if (device, dtype) == ("cpu", torch.bfloat16):
        pytest.skip("triton's interpreter takes the bits of bfloat16 matrices for integers: this one needs a GPU")
    both = pair(device, "window+2", dtype=dtype)  # holds the same rows whatever is rounded
    query, key, value = draw(device, 42)
    query[..., 0], key[..., 0] = 20.0, 1.0  # the largest number by far says nothing: the others choose
    rows = tuple(x.to(dtype) for x in (query / 4, key, value))
    for slots in both:
        read(slots, rows, 0, 40, None)
    for t in range(40, 42):
        outputs = [read(slots, rows, t, t + 1, Recalling(1, starts=True)) for slots in both]
        assert guests_of(both[0]) == guests_of(both[1])
        torch.testing.assert_close(*outputs, atol=5e-2, rtol=5e-2)


def test_guests_are_rows_of_the_archive(device: str) -> None:
    _, slots = pair(device)
    rows = draw(device, 71)
    read(slots, rows, 0, 70, None)
    read(slots, rows, 70, 71, Recalling(1, starts=True))
    for k in range(KV_HEADS):
        for i, position in enumerate(slots.guest_position[0, k].tolist()):
            if position >= 0:
                assert torch.equal(slots.guest_keys[0, k, i], rows[1][0, k, position])
                assert torch.equal(slots.guest_values[0, k, i], rows[2][0, k, position])
    held = set(slots.position.flatten().tolist())
    assert all(not held & guests for guests in guests_of(slots))


def test_padding_and_sequences_of_a_batch(device: str) -> None:
    both, rows = pair(device, batch=3), draw(device, 38, batch=3)
    real = torch.ones(3, 36, dtype=torch.bool, device=device)
    real[1, :11], real[2] = False, False
    outputs = [read(slots, rows, 0, 36, None, real) for slots in both]
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
    step = torch.tensor([[True], [True], [False]], device=device)
    for t in range(36, 38):
        outputs = [read(slots, rows, t, t + 1, Recalling(1, starts=False), step) for slots in both]
        torch.testing.assert_close(outputs[0][:2], outputs[1][:2], atol=1e-4, rtol=1e-4)
        assert guests_of(both[0])[:4] == guests_of(both[1])[:4]
        assert not any(guests_of(both[1])[4:])
    assert both[1].seen.tolist() == [38, 27, 0]


@pytest.mark.slow
def test_archives_of_several_segments_and_forks(device: str) -> None:
    plain, slots = pair(device)
    length = SEGMENT + 70
    rows, other = draw(device, length), draw(device, length, seed=1)
    for layer in (plain, slots):
        read(layer, rows, 0, SEGMENT + 20, None)
    forks = [layer.select(torch.tensor([0])) for layer in (plain, slots)]
    for layer in (plain, slots):
        read(layer, rows, SEGMENT + 20, SEGMENT + 40, None)
    for first, second, text in ((plain, slots, rows), (*forks, other)):
        begin = SEGMENT + 40 if text is rows else SEGMENT + 20
        outputs = [read(layer, text, begin, begin + 3, Recalling(1, starts=True)) for layer in (first, second)]
        torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
        assert guests_of(first) == guests_of(second)
