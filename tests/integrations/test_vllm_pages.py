"""Pages compute what slots compute, whichever page a request has and whoever had it before; no vLLM is needed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend
from msrnn.bound import Bound, check_size
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.integrations.vllm_pages import ALIGNMENT, Pages, measure_page
from msrnn.layer import attend
from msrnn.policy import Policy

CPU = torch.device("cpu")
SHAPE = LayerShape(heads=6, kv_heads=2, key_dim=16, value_dim=8, dtype=torch.float32, device=CPU, layer=1)
SCORING = Scoring(0.25)
POLICIES = ("tova", "h2o", "window+2", "echo", "random", "tova~20")
SIZE = 9
Rows = tuple[Tensor, Tensor, Tensor]  # query, key, value


def bound_of(policy: str) -> Bound:
    value = Policy.parse(policy)
    check_size(value, SIZE)
    return Bound(value, SIZE, value.horizon)


def open_pages(policy: str, count: int = 5) -> Pages:
    """Pages that are not next to each other, in memory that is full of NaN."""
    size = measure_page(SHAPE, bound_of(policy))
    memory = torch.full((count, 3 * size), 255, dtype=torch.uint8)
    return Pages(memory[:, size : 2 * size], SHAPE, bound_of(policy))


def draw(tokens: int, seed: int) -> Rows:
    chance = torch.Generator().manual_seed(seed)
    sizes = (SHAPE.heads, SHAPE.key_dim), (SHAPE.kv_heads, SHAPE.key_dim), (SHAPE.kv_heads, SHAPE.value_dim)
    return tuple(torch.randn(tokens, *size, generator=chance) for size in sizes)  # type: ignore[return-value]


def expect(policy: str, rows: Rows, backend: Any) -> tuple[Tensor, Slots]:
    slots = Slots(1, SHAPE, bound_of(policy))
    q, k, v = (x.transpose(0, 1)[None] for x in rows)
    return attend(slots, q, k, v, slots.advance(len(rows[0]), None), SCORING, 1, backend)[0], slots


def held(slots: Slots) -> Tensor:
    return slots.position.sort(-1).values


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["torch", "numba"])
def test_a_page_reads_as_slots_do(policy: str, name: str) -> None:
    """However the tokens are split, after another request has used the page."""
    backend, pages, rows = resolve_backend(name, CPU), open_pages(policy), draw(40, seed=1)
    expected, slots = expect(policy, rows, backend)
    for splits in ([40], [1] * 40, [17, 1, 1, 21]):
        pages.clear(3)
        q, k, v = (x.split(splits) for x in rows)
        found = torch.cat([pages.read(3, *part, SCORING, backend) for part in zip(q, k, v, strict=True)])
        torch.testing.assert_close(found, expected)
        assert torch.equal(held(pages.view(3)), held(slots))
        assert pages.view(3).seen.tolist() == [40]


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_of_many_requests_at_once(policy: str) -> None:
    """They compute what each request computes alone, and touch no row of the others."""
    backend, one, other = resolve_backend("torch", CPU), open_pages(policy), open_pages(policy)
    for page, length in ((4, 13), (1, 5), (2, 30)):
        for pages in (one, other):
            pages.clear(page)
            pages.read(page, *draw(length, seed=page), SCORING, backend)
    idle = {key: value[2].clone() for key, value in one.slots.tensors().items()}
    for step in range(12):
        q, k, v = draw(2, seed=100 + step)
        together = one.step(torch.tensor([4, 1]), q, k, v, SCORING, backend)
        alone = [
            other.read(page, q[i, None], k[i, None], v[i, None], SCORING, backend) for i, page in enumerate((4, 1))
        ]
        torch.testing.assert_close(together, torch.cat(alone))
    for page in (4, 1):
        assert torch.equal(held(one.view(page)), held(other.view(page)))
        assert torch.equal(one.view(page).seen, other.view(page).seen)
    kept = idle["position"] >= 0
    for key, value in one.slots.tensors().items():
        rows_kept = kept.expand(SHAPE.kv_heads, -1) if key in ("keys", "values") else kept
        whole = key in ("seen", "protected", "position")
        assert torch.equal(value[2] if whole else value[2][rows_kept], idle[key] if whole else idle[key][rows_kept])


def test_a_page_lies_in_its_own_memory() -> None:
    """Buffers do not overlap, and begin where every device can read them."""
    pages = open_pages("echo")
    tensors = pages.slots.tensors()
    begins = {name: tensor[2].data_ptr() for name, tensor in tensors.items()}
    ends = {name: begins[name] + tensor[2].numel() * tensor.itemsize for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: begins[name])
    assert all(ends[one] <= begins[two] for one, two in pairwise(order))
    assert {(begins[name] - begins[order[0]]) % ALIGNMENT for name in order} == {0}
    assert ends[order[-1]] - begins[order[0]] <= measure_page(SHAPE, bound_of("echo"))
    assert set(tensors) == set(Slots(1, SHAPE, bound_of("echo")).tensors())
