"""8-bit rows that several query heads share, against the definition in float64 and against torch in the same dtype."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from msrnn.backends.torch import TorchBackend
from msrnn.backends.triton.decode import decode_triton
from msrnn.backends.triton.grouped_codes import count_columns
from msrnn.bound import Bound
from msrnn.core.quantization import LARGEST, STATE_DTYPES
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.policy import Policy
from tests.helpers.decode_steps import but, check, layer

pytestmark = pytest.mark.usefixtures("poisoned", "unsplit")
KV_HEADS, BATCH, SIZE = 2, 2, 70


@pytest.fixture
def unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program sees all blocks of a KV head."""
    monkeypatch.setattr("msrnn.backends.triton.decode.PROGRAMS", BATCH * KV_HEADS)


class Case(NamedTuple):
    """A full layer, and a token of its own for each sequence."""

    slots: Slots
    query: Tensor
    key: Tensor
    value: Tensor
    scoring: Scoring

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """Those of keys and of values."""
        keys, values = self.slots.key_scale, self.slots.value_scale
        assert keys is not None
        assert values is not None
        return keys, values

    def scale(self, keys: Tensor | float, values: Tensor | float, query: float = 1.0) -> Case:
        """Other scales of rows, [S] or one for all, and other queries."""
        for scales, given in zip(self.scales, (keys, values), strict=True):
            scales.copy_(torch.as_tensor(given).expand_as(scales))
        return self._replace(query=self.query * query)


def case(
    device: str,
    code: str,
    group: int = 4,
    dim: int = 32,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    size: int = SIZE,
) -> Case:
    """New rows are codes times a power of two: triton's interpreter does not round to float8 as a GPU does."""
    draw, state_dtype, value_dim = torch.Generator().manual_seed(group + dim), STATE_DTYPES[code], value_dim or dim
    shape = LayerShape(group * KV_HEADS, KV_HEADS, dim, value_dim, dtype, torch.device(device), state_dtype)
    slots = Slots(BATCH, shape, Bound(Policy.parse("tova"), size))

    def codes(*dims: int) -> Tensor:
        rows = (torch.randn(dims, generator=draw) * 40).round().clamp(-127, 127)
        rows[..., 0] = LARGEST[state_dtype]
        return rows.to(state_dtype)

    for rows, width in ((slots.keys, dim), (slots.values, value_dim)):
        rows.copy_(codes(BATCH, KV_HEADS, rows.shape[2], width))
    slots.position[..., :size] = torch.arange(size, dtype=torch.int32)
    slots.seen.fill_(size)
    query = torch.randn(BATCH, KV_HEADS, group, dim, generator=draw).to(device, dtype)
    key, value = (codes(BATCH, KV_HEADS, n).to(torch.float32).div(32).to(device, dtype) for n in (dim, value_dim))
    return Case(slots, query, key, value, Scoring(dim**-0.5)).scale(1 / 32, 1 / 32)


def definition(some: Case) -> Tensor:
    """The output in float64."""
    held = some.slots.position[:, :, None, :] >= 0
    keys, values = (
        codes.double() * scale.double()[..., None]
        for codes, scale in zip((some.slots.keys.float(), some.slots.values.float()), some.scales, strict=True)
    )
    keys, values = (
        torch.cat([rows.masked_fill(~held[:, :, 0, :, None], 0), new.double()[:, :, None]], dim=2)
        for rows, new in ((keys, some.key), (values, some.value))
    )
    held = torch.cat([held, torch.ones_like(held[..., :1])], dim=-1)
    scores = (some.query.double() @ keys.mT * some.scoring.scale).masked_fill(~held, -torch.inf)
    return scores.softmax(-1) @ values


def compare(some: Case) -> None:
    """At most twice the error of torch in the same dtype, and a rounding, for every head apart."""
    exact, position = definition(some), some.slots.advance(1, None)[:, 0]
    theirs = some.slots.select(torch.arange(BATCH))
    given = some.query, some.key, some.value, position, some.scoring
    output = decode_triton(some.slots, *given).double()
    reference = TorchBackend().decode(theirs, *given).double()
    rounding = torch.finfo(some.query.dtype).eps * exact.abs().amax(-1)
    allowed = 2 * (reference - exact).abs().amax(-1) + rounding
    assert ((output - exact).abs().amax(-1) <= allowed).all()
    assert ((output - exact).abs().amax(-1) <= 4 * rounding).all(), "torch is no better"


@pytest.mark.parametrize(("heads", "expected"), [(2, 8), (7, 8), (8, 8), (9, 16), (16, 16)])
def test_columns_are_powers_of_two(heads: int, expected: int) -> None:
    assert count_columns(heads) == expected


SHAPES = [(4, 128, 128), (6, 128, 128), (7, 64, 64), (8, 80, 80), (2, 16, 48), (16, 64, 16), (3, 6, 10)]


@pytest.mark.parametrize(
    ("code", "shape"),
    but([("int8", SHAPES[0]), ("int8", SHAPES[4]), ("fp8", SHAPES[2])], product(STATE_DTYPES, SHAPES)),
)
def test_heads_and_dimensions(code: str, shape: tuple[int, int, int], device: str) -> None:
    compare(case(device, code, *shape))


@pytest.mark.parametrize("code", STATE_DTYPES)
@pytest.mark.parametrize("programs", but([12], [8, 12]))
def test_slots_are_split_among_programs(code: str, programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.backends.triton.decode.PROGRAMS", programs)
    compare(case(device, code))


@pytest.mark.parametrize("code", STATE_DTYPES)
def test_float16(code: str, device: str) -> None:
    compare(case(device, code, dtype=torch.float16))


@pytest.mark.parametrize("code", STATE_DTYPES)
@pytest.mark.parametrize("unit", [1e-30, 1e-6, 1e4, 1e30])
def test_values_of_any_size(code: str, unit: float, device: str) -> None:
    some = case(device, code).scale(1 / 32, unit)
    compare(some._replace(value=(some.value * unit).to(some.value.dtype)))


@pytest.mark.parametrize("code", STATE_DTYPES)
@pytest.mark.parametrize(("keys", "query"), [(1e-6, 1e4), (1e4, 1e-6), (1e-20, 1e18), (1e20, 1e-22), (1.0, 1.0)])
def test_keys_and_queries_of_any_size(code: str, keys: float, query: float, device: str) -> None:
    some = case(device, code).scale(keys, 1 / 32, query)
    compare(some._replace(key=(some.key * keys).to(some.key.dtype)))


@pytest.mark.parametrize("code", STATE_DTYPES)
def test_query_heads_of_different_sizes(code: str, device: str) -> None:
    some = case(device, code)
    compare(some._replace(query=some.query * torch.tensor([1.0, 2.0**-10, 30.0, 2.0**6])[:, None].to(some.query)))


@pytest.mark.parametrize("code", STATE_DTYPES)
def test_rows_of_different_sizes(code: str, device: str) -> None:
    rows = torch.arange(SIZE + 1)
    compare(case(device, code).scale(1 / 32, 2.0 ** (rows * 7 % 60 - 40)))
    compare(case(device, code).scale(2.0 ** (rows * 5 % 12 - 14), 2.0 ** (40 - rows)))


@pytest.mark.parametrize("code", STATE_DTYPES)
@pytest.mark.parametrize("seen_first", [False, True])
def test_large_values_that_nobody_attends_to_hide_no_small_ones(code: str, seen_first: bool, device: str) -> None:
    """Among others, or in the new token and the first block, before it is known that nobody will."""
    some, o_s = case(device, code, dim=16).scale(1 / 32, 1e-10), torch.arange(SIZE + 1, device=device)
    far = o_s < 40 if seen_first else o_s % 3 == 0
    some.slots.keys[:] = torch.where(far[:, None], -100.0, 100.0).to(some.slots.keys.dtype)
    some.scales[1][:] = torch.where(far, 1e10, 1e-10).to(torch.bfloat16)
    key, value = torch.full_like(some.key, -3 if seen_first else 3), some.value * (1e10 if seen_first else 1e-10)
    some = some._replace(query=torch.full_like(some.query, 4), key=key, value=value)
    assert definition(some).abs().max() < 1e-7
    compare(some)


@pytest.mark.parametrize("code", STATE_DTYPES)
def test_what_lies_in_an_empty_slot_does_not_matter(code: str, device: str) -> None:
    some = case(device, code)
    empty = torch.arange(SIZE + 1, device=device) % 3 > 0
    some.slots.position[..., empty] = -1
    for codes in (some.slots.keys, some.slots.values):
        codes.view(torch.uint8)[:, :, empty] = 0x7F  # NaN in fp8
    for scale in some.scales:
        scale[..., empty] = torch.nan
    compare(some)


@pytest.mark.parametrize("code", STATE_DTYPES)
def test_the_first_token(code: str, device: str) -> None:
    some = case(device, code, size=5)
    some.slots.position.fill_(-1)
    for scale in some.scales:
        scale.fill_(torch.nan)
    compare(some)


def test_a_row_of_nan_stays_in_its_heads(device: str) -> None:
    some = case(device, "int8")
    some.scales[1][0, 1, 3] = torch.nan
    output = decode_triton(
        some.slots, some.query, some.key, some.value, some.slots.advance(1, None)[:, 0], some.scoring
    )
    assert output[0, 1].isnan().all()
    assert output[0, 0].isfinite().all()
    assert output[1].isfinite().all()


@pytest.mark.parametrize(
    ("policy", "more"),
    but(
        [("h2o", {}), ("tova", {"softcap": 2.0, "sinks": True})],
        [("h2o", {}), ("tova", {"softcap": 2.0, "sinks": True}), ("window+2", {}), ("echo", {"dim": 80})],
    ),
)
@pytest.mark.parametrize("window", [None, 4])
def test_steps(policy: str, more: dict[str, object], window: int | None, device: str) -> None:
    bound = Bound(Policy.parse(policy), 6, window=window)
    check(layer(device, bound, 6, dtype=torch.float16, state_dtype=torch.int8, **more), steps=3, before=5)
