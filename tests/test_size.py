"""Size: what users write, the value that it means, and its name."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrnn.budget import NAMES, load_budget
from msrnn.errors import FileError, UsageError
from msrnn.policy import FULL, Policy
from msrnn.size import Size, SizeLike, joint_name, joint_numbers, layer_sizes, parse_policy, resolve
from tests.test_budget import written

UPPER = load_budget("upper")
ECHO = Policy.parse("echo")


@pytest.mark.parametrize(
    ("given", "value", "name"),
    [
        (512, Size(512), "512"),
        ("512", Size(512), "512"),
        (Size(512), Size(512), "512"),
        ([512, None], Size((512, None)), "[512, None]"),
        ((8,), Size((8,)), "[8]"),
        ("[512, none,3]", Size((512, None, 3)), "[512, None, 3]"),
        ("512:upper", Size(512, UPPER), "512:upper"),
        (" 512:UPPER", Size(512, UPPER), "512:upper"),
    ],
)
def test_what_users_write(given: SizeLike, value: Size, name: str) -> None:
    assert Size.parse(given) == value
    assert value.name == name
    assert Size.parse(name) == value
    assert hash(Size.parse(given)) == hash(value)
    assert pickle.loads(pickle.dumps(value)) == value


@given(rows=st.integers(1) | st.lists(st.none() | st.integers(1), min_size=1), budget=st.sampled_from(sorted(NAMES)))
def test_a_size_is_its_name(rows: Any, budget: str) -> None:
    if isinstance(rows, list) and set(rows) == {None}:
        rows.append(1)
    assert Size.parse(Size.parse(rows).name) == Size.parse(rows)
    if isinstance(rows, int):
        assert Size.parse(f"{rows}:{budget}").name == f"{rows}:{budget}"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (0, UsageError, "size=0: must be at least 1"),
        ("0", UsageError, "size=0: must be at least 1"),
        (True, TypeError, "size=True: must be a whole number"),
        (2.5, TypeError, r"size=2\.5: must be a whole number"),
        (None, TypeError, "only policy 'full' has no size"),
        ({8}, TypeError, "must be a whole number"),
        ("many", UsageError, "size='many': must be a whole number, or a mean and a budget, as in 512:upper"),
        ("", UsageError, "size='': must be a whole number"),
        ("[8, x]", UsageError, r"size='\[8, x\]': must be"),
        ("9" * 5000, UsageError, "size='9"),
        ([None, None], UsageError, "bounds no layer"),
        ([8, 0], UsageError, "layer 1: size=0"),
        ("512:best", UsageError, "budget 'best': neither a file nor one of upper, pyramid"),
        ("[8, 8]:upper", UsageError, "budget 'upper' divides a mean size"),
    ],
)
def test_what_is_no_size(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Size.parse(given)


def test_full_ignores_a_size_but_not_any_value() -> None:
    for size in (None, 512, "512:upper", [8, None]):
        assert resolve("full", size) == (FULL, None)
    with pytest.raises(UsageError, match="size='nonsense': must be a whole number"):
        resolve("full", "nonsense")
    with pytest.raises(UsageError, match="size=0: must be at least 1"):
        resolve("full", 0)
    wrong: Any = 2.5
    with pytest.raises(TypeError, match=r"size=2\.5: must be a whole number"):
        resolve("full", wrong)


def test_a_size_by_its_fields() -> None:
    rows: Any = [512, None]
    budget: Any = "upper"
    assert Size(rows) == Size((512, None))
    with pytest.raises(UsageError, match=r"budget='upper': must be a Budget; .* Size\.parse\('512:upper'\)"):
        Size(512, budget)


def test_the_rows_of_each_layer() -> None:
    nothing: list[None] = [None] * 4
    assert Size(8).of_layers(nothing, [False] * 4) == [8] * 4
    assert Size((8, None, 9, 1)).of_layers(nothing, [False] * 4) == [8, None, 9, 1]
    assert Size(8, UPPER).of_layers(nothing, [False] * 4) == [6, 6, 10, 10]
    assert Size(8, UPPER).of_layers([None, 5, None, None], [False, False, True, False]) == [6, 8, 8, 10]
    assert layer_sizes(FULL, None, nothing, [False] * 4) == nothing


def test_a_budget_may_stand_with_the_policy(tmp_path: Path) -> None:
    """As it did before sizes had budgets."""
    path = written(tmp_path / "a=b,c.json")
    expected = ECHO, Size(512, UPPER)
    assert resolve("echo:upper", 512) == resolve("Echo:UPPER", "512") == resolve("echo", "512:upper") == expected
    assert resolve(f"echo+1~900:{path}", 16)[1] == Size.parse(f"16:{path}")
    assert resolve("decay=0.5,budget=upper,first=1", 9) == (Policy(0.5, first=1), Size(9, UPPER))
    assert resolve("budget=upper", 9) == (Policy(0.0), Size(9, UPPER))
    assert resolve("decay=0.5,BUDGET=none", 9) == (Policy(0.5), Size(9))
    for policy, size, message in (
        ("full:upper", 9, "policy 'full' evicts nothing"),
        ("echo:upper", "9:upper", "both have a budget"),
        ("decay=0.5,budget=upper,budget=upper", 9, "budget is given twice"),
        ("echo:best", 9, "budget 'best': neither"),
        (f"echo:{'x' * 300}", 9, "x{50}"),
        (f"echo:{tmp_path}", 9, "neither a file"),
        ("tova+4:upper", 4, "first=4"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve(policy, size)
    with pytest.raises(UsageError, match="a budget belongs to the size, as in policy 'echo' and size '512:upper'"):
        Policy.parse("echo:upper")


@pytest.mark.parametrize(
    "name",
    ["tova", "echo:upper", "echo+1~900:pyramid", "decay=0.5,per=layer,first=0,recent=0,horizon=9,budget=upper", "full"],
)
def test_tables_have_the_names_that_users_know(name: str) -> None:
    assert joint_name(*parse_policy(name)) == name


def test_what_identifies_results(tmp_path: Path) -> None:
    """What the file holds, not its name; without a budget, the fields alone."""

    def numbers(name: str) -> dict[str, Any] | None:
        return joint_numbers(*parse_policy(name))

    path = written(tmp_path / "budget.json")
    before = numbers(f"echo:{path}")
    path.rename(tmp_path / "other.json")
    assert numbers(f"echo:{tmp_path / 'other.json'}") == before
    assert numbers(f"echo:{path}") == before, "a file is read once"
    load_budget.cache_clear()
    written(path, losses=[[0.5, 0.1], [0.2, 0.1]])
    assert numbers(f"echo:{path}") != before
    assert numbers("echo") == {
        "decay": 0.98, "per": "layer", "first": 0, "recent": 0.4, "value_norm": True, "horizon": None
    }  # fmt: skip
    assert numbers("echo:upper") == {**(numbers("echo") or {}), "budget": "upper"}
    assert numbers("full") is None


def test_a_file_of_row_weights_is_identified_by_its_content(tmp_path: Path) -> None:
    path, other = tmp_path / "W=1.safetensors", tmp_path / "other.safetensors"
    path.write_bytes(b"some")
    other.write_bytes(b"some")
    name = f"echo+1@{path}:upper"
    assert joint_name(*parse_policy(name)) == name
    policy, budget = parse_policy(name)
    assert (policy, budget and budget.name) == (Policy.parse(f"echo+1@{path}"), "upper")
    numbers = joint_numbers(policy, None)
    assert numbers == joint_numbers(Policy.parse(f"echo+1@{other}"), None)
    assert numbers == {
        **(Policy.parse("echo+1").numbers or {}),
        "weights": hashlib.sha256(b"some").hexdigest(),
    }
    path.write_bytes(b"other numbers")
    assert joint_numbers(policy, None) != numbers, "a file that has changed is read again"
    path.unlink()
    with pytest.raises(FileError, match="No such file"):
        joint_numbers(policy, None)
    fields = f"decay=0.5,per=layer,first=0,recent=0,value_norm=1,weights={other}"
    assert joint_name(*parse_policy(f"{fields},budget=upper")) == f"{fields},budget=upper"
