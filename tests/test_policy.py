from __future__ import annotations

import dataclasses
import math
from decimal import Decimal

import pytest

from msrnn.errors import UsageError
from msrnn.policy import FULL, MEANINGS, NAMES, Policy, same_ranking, split_weights
from msrnn.size import resolve


def test_names_are_points_in_the_space_of_the_fields() -> None:
    assert Policy.parse("tova") == Policy(decay=0.0, per="layer", first=0, recent=0)
    assert Policy.parse("tova+4") == Policy(decay=0.0, per="layer", first=4, recent=0)
    assert Policy.parse("tova-head") == Policy(decay=0.0, per="head")
    assert Policy.parse("window+1") == Policy(decay=None, first=1)
    assert Policy.parse("h2o") == Policy(decay=1.0, per="head", recent=0.5)
    assert Policy.parse("h2o-layer") == Policy(decay=1.0, per="layer", recent=0.5)
    assert Policy.parse("tova~4096") == Policy(decay=0.0, horizon=4096)
    assert (
        Policy.parse("tova+1~4096") == Policy.parse("first=1,horizon=4096") == Policy(decay=0.0, first=1, horizon=4096)
    )
    assert Policy.parse("echo+2") == Policy(decay=0.98, per="layer", first=2, recent=0.4, value_norm=True)


@pytest.mark.parametrize(
    "name",
    [*NAMES, "tova+4", "window+1", "h2o+2", "echo~99", "h2o+2~512", "random+1~99", "echo+2~9@A/b=+~,.safetensors"],
)
def test_a_policy_knows_its_name(name: str) -> None:
    assert Policy.parse(name).name == name


def test_every_name_has_a_meaning() -> None:
    assert NAMES.keys() == MEANINGS.keys()


def test_a_policy_without_a_name_is_told_by_its_numbers() -> None:
    assert Policy(0.5, "head", 1, 2).name == "decay=0.5,per=head,first=1,recent=2"
    assert Policy(0.5, value_norm=True).name == "decay=0.5,per=layer,first=0,recent=0,value_norm=1"
    assert Policy(0.5, horizon=9).name == "decay=0.5,per=layer,first=0,recent=0,horizon=9"


def test_a_policy_is_a_value() -> None:
    assert hash(Policy.parse("tova")) == hash(Policy(0.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy.parse("tova").first = 3  # type: ignore[misc]


def test_a_share_of_the_size_is_rounded_down() -> None:
    assert Policy(1.0, recent=0.5).recent_at(9) == 4
    assert Policy(1.0, recent=3).recent_at(9) == 3


@pytest.mark.parametrize("parts", [100, 1000])
def test_a_share_is_the_decimal_number_that_was_written(parts: int) -> None:
    for k in range(1, parts):
        share = Policy(1.0, recent=float(Decimal(k) / parts))
        for size in range(1, 1025):
            assert share.recent_at(size) == k * size // parts, (k, size)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("tovo", "tova"),
        ("windw+4", "window"),
        ("h20", "h2o"),
        ("ful", "full"),
        ("tova+x", "tova+4"),
        ("tova~x", "tova+4"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=near.replace("+", r"\+")) as error:
        Policy.parse(wrong)
    assert wrong in str(error.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"decay": 1.5}, "1.5"),
        ({"decay": -0.1}, "-0.1"),
        ({"decay": 0.0, "horizon": 1}, "horizon=1"),
        ({"decay": 0.0, "horizon": 9.5}, "horizon=9.5"),
        ({"decay": float("nan")}, "nan"),
        ({"decay": "0"}, "'0'"),
        ({"decay": 0.0, "per": "token"}, "token"),
        ({"decay": 0.0, "first": -1}, "-1"),
        ({"decay": 0.0, "first": 1.5}, "1.5"),
        ({"decay": 0.0, "recent": -2}, "-2"),
        ({"decay": 0.0, "recent": 1.0}, "1.0"),
        ({"decay": 0.0, "recent": True}, "True"),
        ({"decay": 0.0, "value_norm": 1}, "value_norm=1"),
        ({"decay": None, "value_norm": True}, "decay=None"),
    ],
)
def test_a_bad_number_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Policy(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "size", "error", "named"),
    [
        ("tova", 0, ValueError, "size=0"),
        ("tova", -3, ValueError, "size=-3"),
        ("tova", 2.5, TypeError, "2.5"),
        ("tova", None, TypeError, "None"),
        ("tova", True, TypeError, "True"),
        ("tova+4", 4, ValueError, "first=4"),
        ("tova~512", 512, ValueError, "horizon=512 at size=512"),
        (Policy(0.0, first=3, recent=0.5), 6, ValueError, "recent=3"),
        (7, 8, TypeError, "7"),
    ],
)
def test_a_policy_and_a_size_must_fit(name: object, size: object, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        resolve(name, size)  # type: ignore[arg-type]


def test_full_protects_every_token() -> None:
    assert Policy.parse("full") == Policy(None, recent=math.inf) == FULL
    assert (FULL.name, FULL.evicts, FULL.numbers) == ("full", False, None)
    assert all(policy.evicts for policy in NAMES.values())
    assert resolve("full", None) == resolve(FULL, 512) == (FULL, None)
    with pytest.raises(ValueError, match="recent=inf: protects every token"):
        Policy(0.0, recent=math.inf)
    for name in ("full+4", "full~512"):
        with pytest.raises(ValueError, match="nothing to protect; write 'full'"):
            Policy.parse(name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("decay=0.9,recent=0.25", Policy(0.9, recent=0.25)),
        ("decay=none,first=4", Policy(None, first=4)),
        ("per=head,recent=3", Policy(0.0, "head", recent=3)),
        ("decay=1.0,per=head,first=0,recent=0.5", NAMES["h2o"]),
        ("decay=0.5,value_norm=1", Policy(0.5, value_norm=True)),
        ("decay=0.5,value_norm=0", Policy(0.5)),
    ],
)
def test_policies_by_their_numbers(text: str, value: Policy) -> None:
    assert Policy.parse(text) == value
    assert Policy.parse(value.name) == value


@pytest.mark.parametrize(
    "text", ["decay=2", "decay=", "decay=0.5,per=row", "rate=0.5", "decay=0.5,first=x", "value_norm=2", "=", "a,b=1"]
)
def test_numbers_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it as decay="):
        Policy.parse(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("decay=0.5,value_norm=2", "value_norm='2': must be 0 or 1"),
        ("value_norm=yes", "value_norm='yes': must be 0 or 1"),
        ("decay=0.9,decay=0.8", "decay is given twice"),
        ("decay=0.9,per=head,PER=layer", "per is given twice"),
        ("rate=0.5", "unknown field 'rate', use one of decay, per, first, recent, value_norm, horizon, weights"),
        ("weights=random", "random numbers rank alone, without importance and norm; use decay=None"),
        ("decay=none,value_norm=1,weights=random", "random numbers rank alone"),
        ("weights=a.bin", "weights='a.bin': must be None, 'random', or the name of a .safetensors file"),
        (
            "weights=a.safetensors",
            "multiply the norm of the value vector; use a policy with value_norm",
        ),
    ],
)
def test_what_is_wrong_with_numbers_is_said(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Policy.parse(text)


def test_names_in_any_case() -> None:
    assert Policy.parse("TOVA") == Policy.parse("Tova") == Policy.parse("tova")
    assert Policy.parse("Window+4") == Policy.parse("window+4")
    assert Policy.parse("H2O-Layer+1~512") == Policy.parse("h2o-layer+1~512")
    assert Policy.parse("Decay=None,FIRST=4") == Policy(None, first=4)
    assert Policy.parse("per=HEAD") == Policy(0.0, "head")
    assert resolve("FULL", 512) == resolve("Full", None) == (FULL, None)
    assert Policy.parse("FULL") == FULL


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("tova", "tova+1~8192", True),
        ("decay=0.5,first=3", "decay=0.5,horizon=90", True),
        ("full", "full", True),
        ("tova", "tova-head", False),
        ("echo", "decay=0.98,recent=0.4", False),
        ("full", "tova", False),
    ],
)
def test_policies_that_rank_alike(one: str, other: str, alike: bool) -> None:
    first, second = Policy.parse(one), Policy.parse(other)
    assert same_ranking(first, second) is same_ranking(second, first) is alike


def test_equal_policies_have_equal_names() -> None:
    assert Policy(decay=1, recent=0.25).name == Policy(decay=1.0, recent=0.25).name
    assert Policy(decay=0.5, recent=0).name == Policy(decay=0.5, recent=0.0).name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Echo+1@Dir/W.safetensors", Policy(0.98, "layer", 1, 0.4, True, weights="Dir/W.safetensors")),
        ("ECHO~9@W.safetensors", Policy(0.98, "layer", 0, 0.4, True, 9, "W.safetensors")),
        ("echo@a@b.safetensors", Policy(0.98, recent=0.4, value_norm=True, weights="a@b.safetensors")),
        ("decay=0.5,value_norm=1,weights=Dir/W.safetensors", Policy(0.5, value_norm=True, weights="Dir/W.safetensors")),
        ("decay=none,per=head,weights=Random", NAMES["random"]),
        ("decay=0.5,weights=none", Policy(0.5)),
    ],
)
def test_row_weights_by_name_and_by_field(text: str, value: Policy) -> None:
    assert Policy.parse(text) == value
    assert Policy.parse(value.name) == value


def test_a_policy_knows_its_kind_of_weights() -> None:
    kinds = {name: (policy.weighs, policy.learned) for name, policy in NAMES.items() if policy.weighs}
    assert kinds == {"echo": (True, False), "random": (True, False)}
    learned = Policy.parse("echo+1@x.safetensors")
    assert (learned.weighs, learned.learned, learned.without_weights) == (True, True, Policy.parse("echo+1"))
    assert NAMES["random"].without_weights is NAMES["random"]
    assert not same_ranking(learned, learned.without_weights)
    assert same_ranking(learned, Policy.parse("echo~99@x.safetensors"))
    assert "weights" not in (NAMES["echo"].numbers or {}), "results that are stored are found"
    assert (NAMES["random"].numbers or {})["weights"] == "random"


@pytest.mark.parametrize(
    ("name", "head", "rest"),
    [
        ("echo@w.safetensors", "echo@w.safetensors", ""),
        ("echo@w.safetensors:upper", "echo@w.safetensors", ":upper"),
        ("echo@w.safetensors@compressed:15", "echo@w.safetensors", "@compressed:15"),
        ("echo@w.safetensors:upper@compressed:15", "echo@w.safetensors", ":upper@compressed:15"),
        ("echo@w.safetensors.safetensors", "echo@w.safetensors.safetensors", ""),
        ("tova@compressed:15", "", "tova@compressed:15"),
        ("decay=0.5,weights=w.safetensors", "", "decay=0.5,weights=w.safetensors"),
        ("echo", "", "echo"),
    ],
)
def test_a_weights_file_is_told_by_its_suffix(name: str, head: str, rest: str) -> None:
    assert split_weights(name) == (head, rest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tova@w.safetensors", "multiply the norm of the value vector"),
        ("random@w.safetensors", "multiply the norm"),
        ("full@w.safetensors", "multiply the norm"),
        ("ecco@w.safetensors", "did you mean 'echo'"),
        ("echo@w.bin", "row weights are a file whose name ends with .safetensors"),
        ("echo@w.safetensors:upper", "a budget belongs to the size"),
        ("echo@w.safetensors@compressed", "row weights are a file"),
        ("echo@.safetensors", "row weights are a file"),
    ],
)
def test_row_weights_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Policy.parse(text)


@pytest.mark.parametrize(
    ("policy", "file"),
    [
        (NAMES["echo"], "a.safetensors@b.safetensors"),
        (NAMES["echo"], "a.safetensors:b.safetensors"),
        (Policy(0.5, value_norm=True), "a,b.safetensors"),
    ],
)
def test_files_whose_names_cannot_be_read_back_are_refused(policy: Policy, file: str) -> None:
    with pytest.raises(UsageError, match="cannot be read back; rename the file or its folder"):
        dataclasses.replace(policy, weights=file)
