"""NaN and infinite numbers stay in their own row of the batch, and every row keeps its size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from msrnn.backends.triton.decode import Tile
from msrnn.bound import Bound
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.rope import Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import HELD, LayerShape, Slots
from msrnn.policy import Policy
from msrnn.reference import recurrent
from tests.helpers.bounds import BOUNDS
from tests.helpers.layers import BACKENDS, Fenced, held, random_tokens, read

slow = pytest.mark.slow  # in triton's interpreter; a GPU runs all of them
LENGTH, SHORT, STEPS, BREAKS_AT, DIM = 15, 8, 3, 3, 16
HEADS, KV_HEADS = 4, 2
CHUNKS = [1, 4, 128]
BROKEN = {1: ("query", torch.nan), 3: ("key", torch.nan), 5: ("value", torch.nan), 6: ("key", torch.inf)}
BROKEN |= {7: ("value", -torch.inf)}
LAYERS = {name: BOUNDS[name] for name in ("tova", "window+4", "h2o", "decay-sliding", "echo+2~12", "value-head")}
LAYERS["echo"] = Bound(Policy.parse("echo"), 6)

# Few and small, since triton's interpreter is slow: chunk, what breaks, and the bound.
SMALL = {
    "tova": (128, "key", torch.nan, Bound(Policy.parse("tova"), 3)),
    "tova, token by token": (1, "key", torch.nan, Bound(Policy.parse("tova"), 3)),
    "h2o": (128, "query", torch.nan, Bound(Policy.parse("h2o"), 4)),
    "h2o, token by token": (1, "value", torch.inf, Bound(Policy.parse("h2o"), 4)),
    "window+1": (3, "value", torch.nan, Bound(Policy.parse("window+1"), 3)),
    "echo+1~5": (3, "value", -torch.inf, Bound(Policy.parse("echo+1~5"), 4, window=5)),
    "echo, token by token": (1, "query", torch.nan, Bound(Policy.parse("echo"), 4)),
}

pytestmark = [
    pytest.mark.usefixtures("poisoned", "narrow"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and small blocks are more of them."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("msrnn.backends.triton.prefill.MOST", 16)


def broken(tokens: tuple[Tensor, ...], rows: dict[int, tuple[str, float]] = BROKEN) -> tuple[Tensor, ...]:
    parts = dict(zip(("query", "key", "value"), (x.clone() for x in tokens), strict=True))
    for row, (name, number) in rows.items():
        parts[name][row, :, BREAKS_AT, 3] = number
    return tuple(parts.values())


def check_isolated(
    backend: str,
    tokens: tuple[Tensor, ...],
    rows: dict[int, tuple[str, float]],
    chunk: int,
    shape: LayerShape,
    bound: Bound,
    steps: int = STEPS,
) -> None:
    """A batch whose broken rows lie between clean ones, and the clean ones alone."""
    batch, scoring = tokens[0].shape[0], Scoring(DIM**-0.5)
    clean = [row for row in range(batch) if row not in rows]
    damaged, undamaged = Fenced(batch, shape, bound), Fenced(len(clean), shape, bound)
    found = read(damaged.slots, broken(tokens, rows), scoring, backend, chunk, steps)
    expected = read(undamaged.slots, tuple(x[clean] for x in tokens), scoring, backend, chunk, steps)
    damaged.check()
    assert torch.equal(found[clean], expected)
    for mine, theirs in zip(held(damaged.slots), held(undamaged.slots), strict=True):
        assert torch.equal(mine[clean], theirs)
    for row, (name, number) in rows.items():
        sound = found[row, BREAKS_AT].isfinite().all(-1)  # [H]
        assert not (sound.any() if math.isnan(number) else sound.all()), f"{name} {number} is lost"
    check_sound(damaged.slots, undamaged.slots)


def check_sound(slots: Slots, other: Slots) -> None:
    """As many tokens as in rows that nothing broke, each once, none from the future."""
    position = slots.position.sort(-1).values
    assert ((position >= 0).sum(-1) == (other.position >= 0).sum(-1)[:1]).all()
    assert ((position[..., 1:] > position[..., :-1]) | (position[..., 1:] == -1)).all()
    assert position.max() < slots.seen.max()


def layer(device: str = "cpu", state_dtype: str | None = None, heads: int = HEADS) -> LayerShape:
    return LayerShape(
        heads,
        KV_HEADS,
        DIM,
        DIM,
        torch.float32,
        torch.device(device),
        STATE_DTYPES[state_dtype] if state_dtype else None,
    )


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("bound", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_broken_row_does_not_touch_others(backend: str, bound: Bound, chunk: int) -> None:
    check_isolated(backend, random_tokens(8, HEADS, KV_HEADS, LENGTH, DIM, "cpu"), BROKEN, chunk, layer(), bound)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ("h2o", "window+1") else slow) for case in SMALL]
)
def test_a_broken_row_does_not_touch_others_on_a_gpu(case: str, device: str) -> None:
    chunk, name, number, bound = SMALL[case]
    tokens = random_tokens(3, 2, KV_HEADS, SHORT, DIM, device)
    check_isolated("triton", tokens, {1: (name, number)}, chunk, layer(device, heads=2), bound)


@pytest.mark.parametrize(
    ("backend", "chunk", "steps"),
    [
        *(("torch", 1, 3), ("numba", 1, 3), ("numba", 128, 3), ("numba", 1, 7)),
        pytest.param("triton", 1, 7, marks=slow),
    ],
)
def test_in_eight_bits(backend: str, chunk: int, steps: int) -> None:
    """With 7 steps of 8 tokens, the broken row is quantized by a decode step."""
    tokens = random_tokens(3, 2, KV_HEADS, SHORT, DIM, "cpu")
    check_isolated(
        backend,
        tokens,
        {1: ("key", torch.nan)},
        chunk,
        layer(state_dtype="int8", heads=2),
        Bound(Policy.parse("tova"), 3),
        steps,
    )


@slow
def test_slots_that_are_split_among_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.backends.triton.decode.PLAIN", Tile(2))
    tokens = random_tokens(2, 2, KV_HEADS, SHORT, DIM, device)
    check_isolated("triton", tokens, {0: ("key", torch.nan)}, 1, layer(device, heads=2), Bound(Policy.parse("tova"), 3))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("bound", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_broken_row_follows_the_definition(backend: str, bound: Bound, chunk: int) -> None:
    """Whatever the numbers are: the tokens before stay sound, and so do those that come when what broke was evicted."""
    tokens = broken(random_tokens(8, HEADS, KV_HEADS, LENGTH, DIM, "cpu"))
    slots = Slots(8, layer(), bound)
    found = read(slots, tokens, Scoring(DIM**-0.5), backend, chunk, STEPS)
    for row in range(8):
        query, key, value = (x[row] for x in tokens)
        run = recurrent(query, key, value, bound, DIM**-0.5)
        torch.testing.assert_close(found[row], run.output.transpose(0, 1), atol=1e-5, rtol=1e-5, equal_nan=True)
        for group, times in enumerate(run.evicted_at):
            kept = (times == HELD).nonzero()[:, 0].tolist()
            assert sorted(p for p in slots.position[row, group].tolist() if p >= 0) == kept[-bound.size :]


@pytest.mark.parametrize(("backend", "chunk"), [("torch", 1), ("numba", 1), ("numba", 128), ("triton", 1)])
def test_rows_that_move(backend: str, chunk: int) -> None:
    apart = spacing("compressed:2")
    assert apart is not None
    repositioning = Repositioning(apart, Rope(100.0 ** -(torch.arange(4.0) / 4)))
    tokens, scoring = random_tokens(2, 2, KV_HEADS, SHORT, DIM, "cpu"), Scoring(DIM**-0.5, repositioning=repositioning)
    damaged, undamaged = (Fenced(rows, layer(heads=2), Bound(Policy.parse("tova"), 3)) for rows in (2, 1))
    found = read(damaged.slots, broken(tokens, {0: ("key", torch.nan)}), scoring, backend, chunk)
    expected = read(undamaged.slots, tuple(x[1:] for x in tokens), scoring, backend, chunk)
    damaged.check()
    assert torch.equal(found[1:], expected)
    check_sound(damaged.slots, undamaged.slots)


RESET = [
    (backend, code) for backend in BACKENDS for code in (None, *STATE_DTYPES) if (backend, code) != ("triton", "int8")
]


@pytest.mark.parametrize(("backend", "code"), [*RESET, pytest.param("triton", "int8", marks=slow)])
def test_a_state_that_is_reset_is_as_good_as_new(backend: str, code: str | None) -> None:
    if (backend, code) == ("triton", "fp8"):
        pytest.skip("triton's interpreter loses the carry when it rounds to float8: this one needs a GPU")
    used, new = (Slots(1, layer(state_dtype=code, heads=2), Bound(Policy.parse("echo"), 3)) for _ in range(2))
    tokens, scoring = random_tokens(1, 2, KV_HEADS, SHORT, DIM, "cpu"), Scoring(DIM**-0.5)
    for name in ("key", "value"):
        read(used, broken(tokens, {0: (name, torch.nan)}), scoring, backend, 128, 1)
    used.reset()
    for name, buffer in used.tensors().items():
        assert torch.equal(buffer.float(), getattr(new, name).float()), name
    assert torch.equal(read(used, tokens, scoring, backend, 128, 2), read(new, tokens, scoring, backend, 128, 2))


EMPTY = [(SHORT, 1, 128), (3, 2, 1)]  # length, steps, chunk


@pytest.mark.parametrize(
    ("backend", "length", "steps", "chunk"),
    [
        *((backend, *case) for backend in BACKENDS for case in EMPTY),
        *((backend, SHORT, 1, 1) for backend in BACKENDS[:2]),
        pytest.param("triton", SHORT, 1, 1, marks=slow),
    ],
)
def test_what_lies_in_an_empty_slot_does_not_matter(backend: str, length: int, steps: int, chunk: int) -> None:
    """The last case has decode steps only, so that they find slots that nothing was written into."""
    odd, new = (Slots(1, layer(heads=2), Bound(Policy.parse("echo"), 4)) for _ in range(2))
    for buffer in odd.tensors().values():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    tokens, scoring = random_tokens(1, 2, KV_HEADS, length, DIM, "cpu"), Scoring(DIM**-0.5)
    found, expected = (read(slots, tokens, scoring, backend, chunk, steps) for slots in (odd, new))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for mine, theirs in zip(held(odd), held(new), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def full(bound: Bound, device: str, code: str | None = None) -> Fenced:
    """The second of three sequences has no free slot, which no step leaves behind; the others have one."""
    fenced = Fenced(3, layer(device, code, heads=2), bound)
    fenced.slots.position[:] = torch.arange(bound.slots, dtype=torch.int32)
    fenced.slots.position[[0, 2], :, -1] = -1
    fenced.slots.seen.fill_(bound.slots)
    return fenced


HEAD, LAYER = Bound(Policy.parse("h2o"), 6), Bound(Policy(0.9, value_norm=True), 7)


@pytest.mark.parametrize(
    ("bound", "code"),
    [(HEAD, None), (LAYER, "int8"), *(pytest.param(*case, marks=slow) for case in ((HEAD, "int8"), (LAYER, None)))],
    ids=["head", "layer-int8", "head-int8", "layer"],
)
def test_no_kernel_writes_outside_of_its_row(bound: Bound, code: str | None, device: str) -> None:
    fenced, alone = full(bound, device, code), full(bound, device, code)
    alone.slots.position[1] = -1
    tokens, scoring = random_tokens(3, 2, KV_HEADS, 1, DIM, device), Scoring(DIM**-0.5)
    found, expected = (read(f.slots, tokens, scoring, "triton", 1) for f in (fenced, alone))
    fenced.check()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert all(torch.equal(a[[0, 2]], b[[0, 2]]) for a, b in zip(held(fenced.slots), held(alone.slots), strict=True))


@pytest.mark.parametrize("chunk", [1, 128])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_state_without_a_free_slot_is_refused(backend: str, chunk: int) -> None:
    fenced = full(Bound(Policy.parse("h2o"), 6), "cpu")
    before = {name: buffer.clone() for name, buffer in fenced.slots.tensors().items() if name != "seen"}
    tokens = random_tokens(3, 2, KV_HEADS, 1 if chunk == 1 else 5, DIM, "cpu")
    with pytest.raises(ValueError, match="no free slot"):
        read(fenced.slots, tokens, Scoring(DIM**-0.5), backend, chunk)
    fenced.check()
    for name, buffer in before.items():
        assert torch.equal(getattr(fenced.slots, name), buffer), f"{name} was changed before"
