"""Steps of vLLM as batches: whichever requests a step has, each reads what it reads alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from msrnn.backends import resolve_backend
from msrnn.bound import Bound
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.integrations.vllm_batch import TOGETHER, StepBuffers, count_steps, gather_prompts
from msrnn.integrations.vllm_pages import Pages, measure_page
from msrnn.layer import attend
from msrnn.policy import Policy

SCORING, SIZE, PAGES = Scoring(0.25), 9, 6
POLICIES = ("tova", "h2o", "window+2", "echo", "random")


class Layer:
    """A layer that vLLM would have, and the same requests each in slots of its own."""

    def __init__(self, policy: str, device: str, name: str) -> None:
        value = Policy.parse(policy)
        self.shape = LayerShape(4, 2, 16, 16, torch.float32, torch.device(device), layer=1)
        self.bound = Bound(value, SIZE, value.horizon)
        memory = torch.full((PAGES, measure_page(self.shape, self.bound)), 255, dtype=torch.uint8, device=device)
        self.pages, self.alone = Pages(memory, self.shape, self.bound), dict[int, Slots]()
        self.backend, self.plain = resolve_backend(name, memory.device), resolve_backend("torch", memory.device)
        self.buffers = StepBuffers(8, memory.device)
        self.draw = torch.Generator().manual_seed(1)

    def step(self, requests: list[tuple[int, int, int]], padding: int = 0) -> tuple[Tensor, Tensor]:
        """Requests are (page, begin, end), decode steps first -> outputs of the step, and what they should be."""
        device, heads = self.shape.device, (self.shape.heads, self.shape.kv_heads, self.shape.kv_heads)
        given = [*requests, *[(0, 0, 0)] * padding]
        numbers, begins, ends = (list(column) for column in zip(*given, strict=True))
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        query, key, value = (torch.randn(starts[-1] + padding, h, 16, generator=self.draw).to(device) for h in heads)
        table = torch.tensor(numbers, dtype=torch.int32, device=device)
        count, output = count_steps(lengths), torch.full_like(query, torch.nan)
        steps = self.buffers.fill(
            table[:count], *(torch.tensor(x, device=device) for x in (starts[: count + 1], ends[:count]))
        )
        rest = SCORING, self.backend
        if count:
            q, k, v = (x[:count] for x in (query, key, value))
            output[:count] = self.pages.step(steps.pages, steps.position, q, k, v, *rest)
        for some in gather_prompts(table, count, starts, begins, ends):
            q, k, v = (x[some.tokens] for x in (query, key, value))
            found = self.pages.read_together(some.pages, some.position, q, k, v, *rest)
            output.index_copy_(0, some.targets, found.flatten(0, 1).index_select(0, some.sources))
        parts = [
            self.read_alone(*one, *(x[start:stop] for x in (query, key, value)))
            for one, start, stop in zip(requests, starts, starts[1:], strict=False)
        ]
        return output[: starts[len(requests)]], torch.cat(parts)

    def read_alone(self, page: int, begin: int, end: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if begin == 0:
            self.alone[page] = Slots(1, self.shape, self.bound)
        slots = self.alone[page]
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return attend(slots, q, k, v, slots.advance(end - begin, None), SCORING, 1, self.plain)[0]

    def same_rows(self, page: int) -> bool:
        return torch.equal(self.pages.view(page).position.sort(-1).values, self.alone[page].position.sort(-1).values)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("torch", policy) for policy in POLICIES),
        ("triton", "tova"),
        *(pytest.param("triton", policy, marks=pytest.mark.slow) for policy in POLICIES[1:]),
    ],
)
def test_requests_of_any_length_in_any_page(name: str, policy: str, device: str) -> None:
    """Decode steps with padding, prompts in chunks, and requests that begin in pages that others have left."""
    layer, chance, ends = Layer(policy, device, name), random.Random(3), dict[int, int]()
    for _ in range(8):
        steps = [(page, end, end + 1) for page, end in ends.items() if chance.random() < 0.7]
        prompts = []
        for page in range(1, PAGES):
            if page not in (one[0] for one in steps) and chance.random() < 0.5:
                begin = ends.get(page, 0) if chance.random() < 0.5 else 0
                prompts.append((page, begin, begin + chance.choice([2, 5, 17, 20])))
        if not prompts and chance.random() < 0.5:
            steps += [(page, 0, 1) for page in range(1, PAGES) if page not in ends]  # prompts of one token
        requests = steps + prompts
        if not requests:
            continue
        output, expected = layer.step(requests, padding=0 if prompts else chance.randrange(3))
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
        ends |= {page: end for page, _, end in requests}
        assert all(layer.same_rows(page) for page in ends)
    assert len(ends) > 3


def test_steps_keep_their_addresses(device: str) -> None:
    """A captured graph reads them again and again, for the number of requests that it was captured with."""
    buffers, kept = StepBuffers(8, torch.device(device)), set()
    for pages, ends in (([3, 4, 0], [7, 1, 9]), ([1, 0, 0], [20, 0, 0])):
        table, after = (torch.tensor(x, dtype=torch.int32, device=device) for x in (pages, ends))
        starts = torch.tensor([0, 1, 2, 2], device=device)
        steps = buffers.fill(table, starts, after)
        kept.add((steps.pages.data_ptr(), steps.position.data_ptr()))
        assert steps.pages.tolist() == pages
        real = [page != 0 and stop > start for page, start, stop in zip(pages, [0, 1, 2], [1, 2, 2], strict=True)]
        assert steps.position.tolist() == [end - 1 if one else -1 for end, one in zip(ends, real, strict=True)]
    assert len(kept) == 1


def test_decode_steps_are_at_the_beginning() -> None:
    assert count_steps([1, 1, 0, 0]) == 4
    assert count_steps([1, 1, 0, 1]) == 2  # the last one has the third token, and is read with prompts
    assert count_steps([1, 1, 5, 1]) == 2
    assert count_steps([7]) == count_steps([]) == 0


def test_prompts_of_one_width_are_read_together(device: str) -> None:
    lengths = [2, 90, 16, 3, 1] + [100] * (TOGETHER + 1)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    table = torch.arange(len(lengths), dtype=torch.int32, device=device) + 1
    begins = [5] * len(lengths)
    ends = [5 + length for length in lengths]
    found = gather_prompts(table, 0, starts, begins, ends)
    assert [tuple(one.tokens.shape) for one in found] == [(4, 16), (TOGETHER, 128), (2, 128)]
    targets = torch.cat([one.targets for one in found])
    assert sorted(targets.tolist()) == [*range(sum(lengths))]
    assert found[0].position[0].tolist() == [5, 6] + [-1] * 14
    assert found[0].tokens[1, :16].tolist() == [*range(starts[2], starts[3])]
