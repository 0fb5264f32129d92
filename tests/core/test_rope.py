from __future__ import annotations

import copy
import math
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Thread

import pytest
import torch

from msrnn.backends import resolve_backend
from msrnn.bound import Bound
from msrnn.core.rope import SPACINGS, Capped, GapFunction, Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.hf.rnn import MultiStateRNN
from msrnn.layer import attend
from msrnn.policy import Policy
from tests.helpers.ropes import FAR, FREQUENCY, decoded
from tests.helpers.ropes import impatient as impatient
from tests.helpers.tiny import build, llama

KEPT = [3, 4, 14, 25, 26, 1000, 70_000]
BY_HAND: dict[str, Callable[[int], float]] = {
    "compact": lambda gap: 1,
    "compressed:lnln": lambda gap: gap if gap <= 10 else math.log(math.log(gap)),
    "compressed:ln": lambda gap: gap if gap <= 10 else math.log(gap),
    "compressed:sqrt": lambda gap: gap if gap <= 10 else math.sqrt(gap),
}


@pytest.mark.parametrize("name", SPACINGS)
def test_neighbours_stand_by_their_gaps(name: str) -> None:
    new_position = SPACINGS[name].reposition_sorted(torch.tensor(KEPT)).tolist()
    expected = [0.0]
    for a, b in pairwise(KEPT):
        expected.append(expected[-1] + BY_HAND[name](b - a))
    assert new_position == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", SPACINGS)
def test_the_order_in_memory_means_nothing(name: str) -> None:
    position = torch.tensor([[25, -1, 4, 70_000, 3, 7, 14, 26, 1000], [-1] * 9], dtype=torch.int32)
    present = (position >= 0) & (position != 7)
    repositioning = SPACINGS[name].reposition(position, present)
    order = position[0].argsort()[present[0, position[0].argsort()]]
    assert torch.equal(repositioning[0, order], SPACINGS[name].reposition_sorted(torch.tensor(KEPT)))
    assert repositioning.isfinite().all()


def test_any_function_of_a_gap() -> None:
    calls: list[int] = []

    def third(gap: int) -> float:
        calls.append(gap)
        return min(gap, 90) / 3

    chosen = spacing(third)
    assert chosen is not None
    assert chosen.reposition_sorted(torch.tensor(KEPT)).tolist() == pytest.approx(
        [0, 1 / 3, 11 / 3, 22 / 3, 23 / 3, 113 / 3, 203 / 3]
    )
    assert len(calls) == len(set(calls)), "each gap once"
    same, other = spacing(lambda gap: min(gap, 90) / 3), spacing(lambda gap: gap / 3)
    assert same is not None
    assert other is not None
    assert chosen.name == same.name != other.name


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_function_is_asked_only_for_gaps_that_occur(backend: str) -> None:
    decoded(lambda gap: gap / 3, 10, backend)  # compiled now
    asked: list[int] = []

    def third(gap: int) -> float:
        asked.append(gap)
        return gap / 3

    tracemalloc.start()
    slots = decoded(third, 10**7, backend)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sorted(slots.position[0, 0].tolist()) == [-1, 0, 10**7 + 1, 10**7 + 2]
    assert max(asked) >= 10**7 - 1
    assert len(asked) == len(set(asked)) < 60
    assert most < 2**21


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.core.rope.REMEMBERED", 100)
    function = GapFunction(lambda gap: gap / 3)
    for start in range(1, 1000, 90):
        gaps = torch.arange(start, start + 90)
        assert torch.equal(function(gaps), gaps.double() / 3)
        assert len(function._known) <= 100


@pytest.mark.usefixtures("impatient")
def test_threads_share_a_function() -> None:
    decoded(lambda gap: gap / 3, 10, "numba")

    def ask(function: GapFunction, seed: int) -> bool:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(15):
            gaps = torch.randint(1, 2000 * (seed + 1), (40,), generator=draw)
            if not torch.equal(function(gaps), gaps.double() / 3):
                return False
        return True

    inside: list[int] = []
    asked: list[int] = []

    def third(gap: int) -> float:
        inside.append(gap)
        time.sleep(0)  # other threads may run now
        assert inside == [gap], "two threads are in the caller's function"
        asked.append(gap)
        return inside.pop() / 3

    with ThreadPoolExecutor(8) as threads:
        for _ in range(6):
            function = GapFunction(third)
            assert all(threads.map(ask, [function] * 8, range(8)))
            gaps = torch.arange(1, 3000)
            assert torch.equal(function(gaps), gaps.double() / 3), "and later"
            assert len(asked) == len(set(asked)), "asked again"
            asked.clear()


def test_threads_share_a_table() -> None:
    """A captured graph reads the table of the thread that asked first, so no other thread may replace it."""
    chosen = spacing("compressed:7")
    assert chosen is not None
    tables: list[object] = []
    found: list[object] = []

    def make() -> object:
        table = object()
        tables.append(table)
        if len(tables) == 1:
            other.start()
            other.join(0.5)  # it waits for this table; if nothing made it wait, it would make its own now
        return table

    other = Thread(target=lambda: found.append(chosen.get_table("table", make)))
    found.append(chosen.get_table("table", make))
    other.join()
    assert found == [tables[0], tables[0]]
    assert chosen.get_table("table", make) is tables[0]
    assert len(tables) == 1


def test_a_spacing_is_a_value() -> None:
    chosen = spacing(lambda gap: gap / 3)
    assert copy.deepcopy(chosen) is chosen
    assert spacing("compressed:7") == spacing("compressed:7")
    assert hash(spacing("compressed:7")) == hash(spacing("compressed:7"))


@pytest.mark.parametrize("made", [math.nan, math.inf, -1.0])
def test_functions_that_are_none(made: float) -> None:
    with pytest.raises(ValueError, match=f"returns {made} for a gap of 12"):
        spacing(lambda gap: made if gap == 12 else gap)


def test_names() -> None:
    assert spacing("original") is None
    assert spacing("compressed") is SPACINGS["compressed:lnln"]
    with pytest.raises(ValueError, match="did you mean 'compressed:lnln'"):
        spacing("compressed:lnn")
    with pytest.raises(ValueError, match="use one of original"):
        spacing("xyz")
    with pytest.raises(TypeError, match="positions=10"):
        spacing(10)  # type: ignore[arg-type]


def test_a_largest_gap() -> None:
    chosen = spacing("compressed:016")
    assert chosen is not None
    assert chosen.name == "compressed:16"
    assert chosen.reposition_sorted(torch.tensor(KEPT)).tolist() == [0, 1, 11, 22, 23, 39, 55]
    for name in ("compressed:0", "compressed:-3", "compressed:1.5", "compressed:"):
        with pytest.raises(ValueError, match="positions="):
            spacing(name)


@pytest.mark.parametrize(("length", "size", "limit"), [(64, 8, 7), (64, 9, 7), (65, 8, 8), (64, 63, 1)])
def test_what_is_kept_fits_the_length(length: int, size: int, limit: int) -> None:
    model = build(llama(max_position_embeddings=length))
    rnn = MultiStateRNN(model, "tova", size, positions="fitted")
    repositioning = rnn.spec.repositioning[0]
    assert repositioning is not None
    assert repositioning.spacing.function == Capped(limit)
    assert rnn.spec.fingerprint["positions"] == "fitted"
    if limit > 1:
        apart = repositioning.spacing.reposition_sorted(torch.arange(size + 1) * 10_000)
        assert apart[-1] == limit * size < length <= (limit + 1) * size


@pytest.mark.parametrize("size", [64, 200])
def test_a_size_that_leaves_no_room_is_refused(size: int) -> None:
    model = build(llama(max_position_embeddings=64))
    with pytest.raises(ValueError, match=f"'fitted': size={size} does not fit the 64 positions"):
        MultiStateRNN(model, "tova", size, positions="fitted")
    assert model.config._attn_implementation == "eager"


def test_no_length_to_fit() -> None:
    model = build(llama())
    model.config.__dict__["max_position_embeddings"] = None
    with pytest.raises(ValueError, match=r"'fitted'.*name a largest gap, as in 'compressed:16'"):
        MultiStateRNN(model, "tova", 8, positions="fitted")


def as_the_model_does(rows: torch.Tensor, position: int) -> torch.Tensor:
    """Half-split rotation with angles in float32."""
    angle = torch.tensor(position).float() * FREQUENCY
    cos, sin = (torch.cat([x, x], dim=-1) for x in (angle.cos(), angle.sin()))
    half = torch.cat([-rows[..., 16:], rows[..., :16]], dim=-1)
    return rows * cos + half * sin


@pytest.mark.parametrize("position", [0, 1, 513, 70_001, FAR, 2**24 - 1])
def test_far_positions_lose_no_precision(position: int) -> None:
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    written = as_the_model_does(rows, position)
    new_position = 12.3456789
    exact = Rope(FREQUENCY).rotate(rows, new_position * FREQUENCY.double())
    angle = Rope(FREQUENCY).angle(torch.tensor(position), torch.tensor(new_position, dtype=torch.float64))
    torch.testing.assert_close(Rope(FREQUENCY).rotate(written, angle), exact, atol=2e-6, rtol=0)
    naive = (torch.tensor(new_position - position, dtype=torch.float32) * FREQUENCY).double()
    if position >= FAR:
        assert (Rope(FREQUENCY).rotate(written, naive) - exact).abs().max() > 1e-2


def test_a_thousand_turns_are_one() -> None:
    """Even one after the other; states do not do that, see below."""
    draw = torch.Generator().manual_seed(0)
    rows, rope = torch.randn(8, 32, generator=draw), Rope(FREQUENCY)
    turns = torch.randn(1000, generator=draw, dtype=torch.float64) * 50
    turned = rows
    for by in turns:
        turned = rope.rotate(turned, by * FREQUENCY.double())
    once = rope.rotate(rows, turns.sum() * FREQUENCY.double())
    torch.testing.assert_close(turned, once, atol=2e-5, rtol=0)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_keys_stay_as_they_were_written(backend: str) -> None:
    """After a thousand steps that moved them, they are the same bits, and are read as one turn makes them."""
    draw = torch.Generator().manual_seed(0)
    length, repositioning = (
        1200 if backend == "numba" else 300,
        Repositioning(SPACINGS["compressed:lnln"], Rope(FREQUENCY[:4])),
    )
    query, key, value = (torch.randn(1, 2, length, 8, generator=draw) for _ in range(3))
    slots = Slots(1, LayerShape(2, 2, 8, 8, query.dtype, query.device), Bound(Policy.parse("tova+2"), 24))
    scoring = Scoring(0.5, repositioning=repositioning)
    reader = resolve_backend(backend, key.device)
    outputs = attend(slots, query, key, value, slots.advance(length, None), scoring, 512, reader)
    held = (slots.position[0, 0] >= 0).nonzero()[:, 0]
    where = slots.position[0, 0, held].long()
    assert {0, 1} <= {*where.tolist()}, "those that are moved by every step"
    assert torch.equal(slots.keys[0, :, held], key[0, :, where])
    assert torch.equal(slots.values[0, :, held], value[0, :, where])

    again = Slots(1, LayerShape(2, 2, 8, 8, query.dtype, query.device), Bound(Policy.parse("tova+2"), 24))
    before = [x[:, :, : length - 1] for x in (query, key, value)]
    attend(again, before[0], before[1], before[2], again.advance(length - 1, None), scoring, 512, reader)
    seen = [*sorted(p for p in again.position[0, 0].tolist() if p >= 0), length - 1]
    new_position = repositioning.spacing.reposition_sorted(torch.tensor(seen))
    k = repositioning.rerotate(key[0, :, seen], torch.tensor(seen), new_position)
    q = repositioning.rerotate(query[0, :, -1:], torch.tensor(seen[-1:]), new_position[-1:])
    expected = (q @ k.mT * 0.5).softmax(-1) @ value[0, :, seen]
    torch.testing.assert_close(outputs[0, -1], expected[:, 0], atol=1e-5, rtol=1e-5)
