"""Pages compute what slots compute, whichever page a request has and whoever had it before; no vLLM is needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend
from msrnn.bound import Bound, check_size
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.integrations.vllm_pages import ALIGNMENT, Pages, group_widths, measure_page, pad_width
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


def open_pages(policy: str, count: int = 5, device: str = "cpu") -> Pages:
    """Pages in memory that is full of NaN."""
    memory = torch.full((count, measure_page(SHAPE, bound_of(policy))), 255, dtype=torch.uint8, device=device)
    return Pages(memory, replace(SHAPE, device=torch.device(device)), bound_of(policy))


def draw(tokens: int, seed: int, device: str = "cpu") -> Rows:
    chance = torch.Generator().manual_seed(seed)
    sizes = (SHAPE.heads, SHAPE.key_dim), (SHAPE.kv_heads, SHAPE.key_dim), (SHAPE.kv_heads, SHAPE.value_dim)
    return tuple(torch.randn(tokens, *size, generator=chance).to(device) for size in sizes)  # type: ignore[return-value]


def expect(policy: str, rows: Rows, backend: Any) -> tuple[Tensor, Slots]:
    slots = Slots(1, replace(SHAPE, device=rows[0].device), bound_of(policy))
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
        begins = [0, *accumulate(splits)][:-1]
        parts = zip(begins, *(x.split(splits) for x in rows), strict=True)
        found = torch.cat([pages.read(3, begin, q, k, v, SCORING, backend) for begin, q, k, v in parts])
        torch.testing.assert_close(found, expected)
        assert torch.equal(held(pages.view(3)), held(slots))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_prompts_that_are_read_together(name: str, policy: str, device: str) -> None:
    """With padding at their ends, in any pages, after other requests; one of them continues what its page has read."""
    backend, pages = resolve_backend(name, torch.device(device)), open_pages(policy, device=device)
    plain = resolve_backend("torch", torch.device(device))
    first, *rows = (draw(length, seed, device) for length, seed in ((11, 9), (20, 1), (14, 2), (3, 3)))
    pages.read(4, 0, *draw(30, 8, device), SCORING, plain)
    pages.read(1, 0, *first, SCORING, plain)
    lengths, begins = [20, 14, 3], [0, 11, 0]
    position = torch.full((3, 24), -1, dtype=torch.int32, device=device)
    padded = [torch.zeros(3, 24, *x.shape[1:], device=device) for x in rows[0]]
    for i, (length, begin) in enumerate(zip(lengths, begins, strict=True)):
        position[i, :length] = torch.arange(begin, begin + length)
        for into, x in zip(padded, rows[i], strict=True):
            into[i, :length] = x
    numbers = torch.tensor([4, 1, 2], device=device)
    q, k, v = padded
    output = pages.read_together(numbers, position, q, k, v, SCORING, backend)
    q, k, v = (torch.cat(pair) for pair in zip(first, rows[1], strict=True))
    whole: list[Rows] = [rows[0], (q, k, v), rows[2]]
    for i, text in enumerate(whole):
        expected, slots = expect(policy, text, plain)
        torch.testing.assert_close(output[i, : lengths[i]], expected[-lengths[i] :], atol=1e-4, rtol=1e-4)
        assert torch.equal(held(pages.view(int(numbers[i]))), held(slots))


def test_widths_that_prompts_are_padded_to() -> None:
    widths = {1: 16, 16: 16, 17: 32, 65: 128, 128: 128, 129: 256, 2048: 2048}
    assert {length: pad_width(length) for length in widths} == widths
    assert group_widths([3, 40, 16, 50, 9, 2], most=3) == [(16, [0, 2, 4]), (16, [5]), (64, [1, 3])]


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_of_many_requests_at_once(policy: str) -> None:
    """They compute what each request computes alone, and touch no row of the others."""
    backend, one, other = resolve_backend("torch", CPU), open_pages(policy), open_pages(policy)
    for page, length in ((4, 13), (1, 5), (2, 30)):
        for pages in (one, other):
            pages.read(page, 0, *draw(length, seed=page), SCORING, backend)
    idle = {key: value[2].clone() for key, value in one.slots.tensors().items()}
    for step in range(12):
        q, k, v = draw(2, seed=100 + step)
        position = torch.tensor([13 + step, 5 + step], dtype=torch.int32)
        together = one.step(torch.tensor([4, 1]), position, q, k, v, SCORING, backend)
        alone = [
            other.read(page, int(position[i]), q[i, None], k[i, None], v[i, None], SCORING, backend)
            for i, page in enumerate((4, 1))
        ]
        torch.testing.assert_close(together, torch.cat(alone))
    for page in (4, 1):
        assert torch.equal(held(one.view(page)), held(other.view(page)))
    kept = idle["position"] >= 0
    for key, value in one.slots.tensors().items():
        rows_kept = kept.expand(SHAPE.kv_heads, -1) if key in ("keys", "values") else kept
        whole = key in ("seen", "protected", "fewer", "position")
        assert torch.equal(value[2] if whole else value[2][rows_kept], idle[key] if whole else idle[key][rows_kept])


def test_a_page_lies_in_its_own_memory() -> None:
    """Buffers do not overlap, those of each kind are contiguous, and begin where every device can read them."""
    pages = open_pages("echo")
    tensors = pages.slots.tensors()
    begins = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    ends = {name: begins[name] + tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: begins[name])
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert all(ends[one] <= begins[two] for one, two in pairwise(order))
    assert {(begins[name] - begins[order[0]]) % ALIGNMENT for name in order} == {0}
    assert ends[order[-1]] - begins[order[0]] <= 5 * measure_page(SHAPE, bound_of("echo"))
    assert set(tensors) == set(Slots(1, SHAPE, bound_of("echo")).tensors())


def test_pages_with_gaps_are_refused() -> None:
    """Kernels would read other pages' rows."""
    size = measure_page(SHAPE, bound_of("tova"))
    with pytest.raises(ValueError, match="gaps"):
        Pages(torch.zeros(4, 2 * size, dtype=torch.uint8)[:, :size], SHAPE, bound_of("tova"))
