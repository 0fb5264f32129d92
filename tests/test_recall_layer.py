"""A layer that recalls, in blocks and token by token, equals the definition; its two ends are known attentions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend
from msrnn.bound import Bound
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape
from msrnn.policy import Policy
from msrnn.recall import Recall, Recalling
from msrnn.recall_layer import attend_recalling
from msrnn.reference import RecallAt, recurrent
from tests.helpers.decode_steps import but

HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 8, 60
SHAPE = LayerShape(HEADS, KV_HEADS, DIM, DIM, torch.float32, torch.device("cpu"))


CASES = product(["tova", "echo", "h2o", "window+2", "tova+1~30"], [1, 4], ["plain", "sinks", "repositioned", "sliding"])


def draw(seed: int, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS, length, DIM, generator=generator) * 2
    key, value = (torch.randn(1, KV_HEADS, length, DIM, generator=generator) for _ in range(2))
    return query, key, value


def read(
    slots: RecallSlots,
    rows: tuple[Tensor, ...],
    scoring: Scoring,
    recalling: Recalling | None,
    backend: str,
    chunk: int,
) -> Tensor:
    T = rows[0].shape[2]
    own = resolve_backend(backend, torch.device("cpu"))
    query, key, value = rows
    rest: Any = scoring, chunk, own, None, None, recalling
    return attend_recalling(slots, query, key, value, slots.advance(T, None), *rest)


def columns(rows: tuple[Tensor, ...], begin: int, end: int) -> tuple[Tensor, ...]:
    return tuple(x[:, :, begin:end] for x in rows)


def repositioning() -> Repositioning:
    spaced = spacing("compressed:3")
    assert spaced is not None
    return Repositioning(spaced, Rope(10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))))


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize(
    ("policy", "every", "kind"),
    but(
        [("echo", 1, "plain"), ("h2o", 4, "sinks"), ("tova+1~30", 4, "repositioned"), ("window+2", 1, "sliding")], CASES
    ),
)
def test_a_layer_that_recalls_is_the_definition(backend: str, policy: str, every: int, kind: str) -> None:
    own = Policy.parse(policy)
    bound = Bound(own, 12, own.horizon, recall=Recall(5, every))
    if kind == "sliding":
        bound = replace(bound, window=24, sliding=True)
    scoring = Scoring(
        0.5,
        None if kind == "plain" else 30.0,
        torch.linspace(-1, 1, HEADS) if kind == "sinks" else None,
        repositioning() if kind == "repositioned" else None,
    )
    rows, slots = draw(1), RecallSlots(1, replace(SHAPE, reach=20), bound)
    output = [read(slots, columns(rows, 0, 30), scoring, None, backend, 7)]
    slots.reserve(LENGTH)
    output += [
        read(slots, columns(rows, begin, end), scoring, Recalling(every, starts=True), backend, 3)
        for begin, end in ((30, 32), (32, 41))
    ]
    steps = [
        read(slots, columns(rows, t, t + 1), scoring, Recalling(every, starts=False), backend, 3)
        for t in range(41, LENGTH)
    ]
    found = torch.cat([*output, *steps], dim=1)[0].transpose(0, 1)
    blocks = list_recalls(30, 41, LENGTH, every)
    query, key, value = (x[0] for x in rows)
    rest: dict[str, Any] = {"softcap": scoring.softcap, "sinks": scoring.sinks, "repositioning": scoring.repositioning}
    truth = recurrent(query, key, value, bound, scoring.scale, **rest, recalls=blocks, reach=20)
    close = (truth.margin < 1e-5).any(0).nonzero()
    cut = int(close[0]) if len(close) else LENGTH
    assert cut > 41
    torch.testing.assert_close(found[:, :cut], truth.output[:, :cut], atol=2e-5, rtol=2e-5)
    without = recurrent(query, key, value, bound, scoring.scale, **rest)
    assert torch.equal(truth.output[:, :30], without.output[:, :30])
    assert not torch.allclose(truth.output[:, 30:], without.output[:, 30:], atol=1e-3)


def list_recalls(first: int, read_until: int, length: int, every: int) -> list[RecallAt]:
    """The blocks of tokens that are read from `first`, then decoded one by one from `read_until` to `length`."""
    starts = sorted({first, *(t for t in range(first, length) if t % every == 0)})
    return [
        RecallAt(start, min(end, read_until) - 1 if start < read_until else start, end)
        for start, end in zip(starts, [*starts[1:], length], strict=True)
    ]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_enough_guests_are_plain_attention_over_all_rows(backend: str) -> None:
    bound = Bound(Policy.parse("echo"), 12, recall=Recall(LENGTH))
    rows, slots, scoring = draw(2), RecallSlots(1, SHAPE, bound), Scoring(0.5)
    read(slots, columns(rows, 0, 40), scoring, None, backend, 7)
    found = read(slots, columns(rows, 40, LENGTH), scoring, Recalling(1, starts=True), backend, 7)
    query, key, value = rows
    mask = torch.ones(LENGTH - 40, LENGTH).tril(40).bool()
    plain = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, 40:], key, value, mask, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(found, plain.transpose(1, 2), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cuts", [[30], [31, 33], [*range(31, 60)]])
def test_reading_token_by_token_does_not_depend_on_the_split(cuts: list[int]) -> None:
    bound = Bound(Policy.parse("tova"), 12, recall=Recall(5))
    rows, scoring = draw(3), Scoring(0.5)
    found = []
    for edges in ([30, LENGTH], sorted({30, *cuts, LENGTH})):
        slots = RecallSlots(1, SHAPE, bound)
        read(slots, columns(rows, 0, 30), scoring, None, "numba", 7)
        found.append(
            torch.cat(
                [
                    read(slots, columns(rows, a, b), scoring, Recalling(1, starts=True), "numba", 7)
                    for a, b in itertools.pairwise(edges)
                ],
                dim=1,
            )
        )
    assert torch.equal(*found)


def test_a_plain_read_sees_no_guests_of_before() -> None:
    bound = Bound(Policy.parse("tova"), 12, recall=Recall(5))
    rows, scoring = draw(4), Scoring(0.5)
    slots, plain = RecallSlots(1, SHAPE, bound), RecallSlots(1, SHAPE, bound)
    read(slots, columns(rows, 0, 30), scoring, None, "numba", 7)
    slots.guest_position.fill_(3)
    read(plain, columns(rows, 0, 30), scoring, None, "numba", 7)
    both = [read(s, columns(rows, 30, LENGTH), scoring, None, "numba", 7) for s in (slots, plain)]
    assert torch.equal(*both)
    assert bool((slots.guest_position == -1).all())
