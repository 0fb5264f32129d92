"""Budgets: sizes of layers that have the given mean, and rows that go where they gain most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import msrnn
from msrnn.budget import FORMAT, NAMES, Curves, load_budget
from msrnn.errors import UsageError
from tests.helpers.tiny import FAMILIES, build, llama, tokens


@given(name=st.sampled_from(sorted(NAMES)), mean=st.integers(1, 3000), layers=st.integers(1, 100))
def test_named_budgets_keep_the_mean(name: str, mean: int, layers: int) -> None:
    sizes = NAMES[name].sizes(mean, layers)
    assert len(sizes) == layers
    assert sum(sizes) == mean * layers
    assert min(sizes) >= 1


def test_named_budgets() -> None:
    assert NAMES["upper"].sizes(512, 4) == [384, 384, 640, 640]
    assert NAMES["upper"].sizes(10, 3) == [8, 10, 12]  # 7.5, 10, 12.5
    assert NAMES["pyramid"].sizes(100, 3) == [195, 100, 5]
    assert NAMES["pyramid"].sizes(1, 20) == [1] * 20


@given(
    curves=st.lists(st.lists(st.floats(-1e-4, 1), min_size=4, max_size=4), min_size=1, max_size=12),
    mean=st.integers(16, 1024),
)
def test_measured_budgets_keep_the_mean(curves: list[list[float]], mean: int) -> None:
    sizes = Curves((16, 64, 256, 1024), tuple(map(tuple, curves))).sizes(mean, len(curves))
    assert sum(sizes) == mean * len(curves)
    assert all(16 <= size <= 1024 for size in sizes)


def test_rows_go_where_they_gain_most() -> None:
    """Costs c / size: the least sum, under a mean, has sizes in proportion to the roots of c."""
    budget = Curves((8, 4096), tuple((c / 8, c / 4096) for c in (1.0, 4.0, 16.0)))
    small, middle, large = budget.sizes(448, 3)
    assert small < middle < large
    best = 1 / 192 + 4 / 384 + 16 / 768
    assert 1 / small + 4 / middle + 16 / large < 1.03 * best  # sizes come in levels
    assert 1.25 * best < 1 / 448 + 4 / 448 + 16 / 448
    # A layer that costs nothing stays at the least size; one that gains nothing more stops there.
    flat = Curves((16, 64, 256), ((0.0, 0.0, 0.0), (0.5, 0.1, 0.1), (0.5, 0.3, 0.1)))
    small, middle, large = flat.sizes(100, 3)
    assert small <= 25
    assert middle <= 75  # the first level that is not below 64
    assert large >= 200
    equal = Curves((16, 64, 256), ((0.0, 0.0, 0.0),) * 4).sizes(100, 4)
    assert max(equal) <= 2 * min(equal), "where nothing is gained, rows are spread"


@pytest.mark.parametrize(
    ("mean", "layers", "message"),
    [(8, 2, "size=8: this budget was measured at sizes from 16 to 64"), (32, 3, "measured on a model with 2 such")],
)
def test_what_a_measured_budget_cannot_divide(mean: int, layers: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Curves((16, 64), ((1.0, 0.5), (1.0, 0.5))).sizes(mean, layers)


def written(path: Path, **changes: Any) -> Path:
    content = {"format": FORMAT, "sizes": [8, 64], "losses": [[0.9, 0.1], [0.11, 0.1]], **changes}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "another"},
        {"sizes": [64, 8]},
        {"sizes": [8]},
        {"sizes": [8, True]},
        {"losses": []},
        {"losses": [[0.4], [0.2]]},
        {"losses": [[0.4, "a"], [0.2, 0.1]]},
        {"losses": [[0.4, float("nan")], [0.2, 0.1]]},
        {"losses": [[10**400, 0.1], [0.2, 0.1]]},
    ],
)
def test_damaged_files(changes: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "budget.json", **changes)
    with pytest.raises(UsageError, match=r"budget\.json: not a budget that msrnn wrote"):
        load_budget(str(path))


@pytest.mark.parametrize("text", ["[", "[" * 100_000, '{"a":' * 100_000, f'{{"format": {"9" * 5000}}}', "\ud800"])
def test_files_that_are_not_json(text: str, tmp_path: Path) -> None:
    load_budget.cache_clear()
    path = tmp_path / "budget.json"
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(UsageError, match=r"budget\.json: not a budget that msrnn wrote") as error:
        load_budget(str(path))
    assert "\n" not in str(error.value)


def test_a_model_under_a_budget(tmp_path: Path) -> None:
    path = written(tmp_path / "budget.json")
    model = build(llama(6, 2))
    rnn = msrnn.MultiStateRNN(model, f"tova:{path}", 30)
    expected = load_budget(str(path)).sizes(30, 2)
    assert rnn.spec.sizes == expected
    assert expected[0] > expected[1]
    assert rnn.spec.mean_size == 30
    # The same as the list: states fit both, and neither fits another division.
    same = msrnn.MultiStateRNN(model, "tova", expected)
    state = rnn.state()
    state.save(tmp_path / "state.safetensors")
    assert same.load_state(tmp_path / "state.safetensors").nbytes == state.nbytes
    ids = tokens(1, 80)
    assert torch.equal(rnn.read(ids, state), same.read(ids, same.state()))
    with pytest.raises(UsageError, match="size"):
        msrnn.MultiStateRNN(model, "tova", 30).load_state(tmp_path / "state.safetensors")


def test_sliding_layers_take_no_part() -> None:
    config = FAMILIES["gemma2"]()
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    spec = msrnn.MultiStateRNN(build(config), "tova:pyramid", 300).spec
    assert spec.divided == [i for i, slides in enumerate(windows) if not slides]
    assert sum(spec.sizes[i] or 0 for i in spec.divided) == 300 * len(spec.divided)


@pytest.mark.parametrize(
    ("policy", "size", "message"),
    [
        ("tova", [8], "size: 1 numbers, but this model has 2 layers"),
        ("tova", [8, 0], "layer 1: size=0: must be at least 1"),
        ("tova+4", [8, 4], "layer 1: first=4 and recent=0 protect 4 tokens"),
        ("tova", [None, None], "bounds no layer"),
        ("tova:upper", [8, 8], "budget 'upper' divides a mean size"),
        ("tova+4:upper", 5, "budget 'upper' at size=5, layer 0: first=4"),
    ],
)
def test_bad_sizes(policy: str, size: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        msrnn.MultiStateRNN(build(llama(6, 2)), policy, size)


@pytest.mark.parametrize("options", [{"state_dtype": "int8"}, {"positions": "fitted"}, {"positions": "compressed"}])
def test_what_needs_a_size_for_every_layer(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="needs a size for every layer"):
        msrnn.MultiStateRNN(build(llama(6, 2)), "tova", [8, None], **options)


def test_a_size_that_is_no_number() -> None:
    with pytest.raises(TypeError, match=r"layer 1: size=2\.5"):
        msrnn.MultiStateRNN(build(llama(6, 2)), "tova", [8, 2.5])  # type: ignore[list-item]
