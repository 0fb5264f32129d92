"""Damaged and manipulated state files: each is refused with one line, or loads as a state that works."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from msrnn.core.state_file import FORMAT, ONE_FILE, load_description
from tests.helpers.saved_states import KINDS, Saved
from tests.helpers.tiny import tokens


def at(*index: int, value: float) -> Callable[[Tensor], Any]:
    return lambda tensor: tensor.__setitem__(index, value)


DESCRIBED: dict[str, tuple[dict[str, Any], str]] = {
    "no rows": ({"batch_size": 0}, "batch_size=0"),
    "fewer than none": ({"batch_size": -1}, "batch_size=-1"),
    "more than fit": ({"batch_size": 10**12}, r"keys: .*, not .*\[1000000000000, "),
    "true rows": ({"batch_size": True}, "batch_size=True"),
    "no number of sequences": ({"batch_size": None}, "batch_size=None"),
    "rows by half": ({"batch_size": 2.0}, "batch_size=2.0"),
    "columns": ({"columns": 17}, "columns 17"),
    "true columns": ({"columns": [True, True]}, "columns .True, True."),
    "fewer columns": ({"columns": [17]}, "list of 2 whole numbers"),
    "columns that differ": ({"columns": [17, 18]}, "same number in every layer"),
    "columns below tokens": ({"columns": [16, 16]}, "17 tokens of 16 columns"),
    "endless columns": ({"columns": [10**30, 10**30]}, "same number in every layer"),
}


@pytest.mark.parametrize("kind", ["head", "full"])
@pytest.mark.parametrize("name", DESCRIBED)
def test_forged_descriptions_are_refused(name: str, kind: str, saved: Callable[[str], Saved]) -> None:
    change, message = DESCRIBED[name]
    one = saved(kind)
    one.write(one.tensors, {**one.description, **change})
    with pytest.raises(ValueError, match=message):
        one.rnns[0].load_state(one.path)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"words"', "true", "[" * 100_000, "9" * 5000, "{", "", "NaN"])
def test_descriptions_that_are_no_object(text: str, saved: Callable[[str], Saved]) -> None:
    one = saved("head")
    one.path.write_bytes(to_bytes(one.tensors, {"msrnn": text}))
    for load in (one.rnns[0].load_state, load_description):
        with pytest.raises(ValueError, match="not a state that msrnn saved") as error:
            load(one.path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("found", [0, -1, True, 1.0, "1", None, [1]])
def test_formats_that_are_no_number(found: object, saved: Callable[[str], Saved]) -> None:
    one = saved("head")
    one.write(one.tensors, {**one.description, "format": found})
    for load in (one.rnns[0].load_state, load_description):
        with pytest.raises(ValueError, match=f"not a state that msrnn saved, its format is {re.escape(repr(found))}"):
            load(one.path)


def test_a_newer_format_is_refused_and_an_older_file_loads(saved: Callable[[str], Saved]) -> None:
    """Files had no number at first: their layout is that of format 1."""
    one = saved("head")
    assert one.description["format"] == ONE_FILE < FORMAT
    one.write(one.tensors, {**one.description, "format": FORMAT + 1})
    for load in (one.rnns[0].load_state, load_description):
        with pytest.raises(ValueError, match=f"format is {FORMAT + 1}, .* up to {FORMAT}; install a newer msrnn"):
            load(one.path)
    one.write(one.tensors, {name: value for name, value in one.description.items() if name != "format"})
    more, loaded = tokens(2, 9, seed=4), one.rnns[0].load_state(one.path)
    assert torch.equal(one.rnns[0].read(more, loaded), one.rnns[0].read(more, one.state.fork(1)))


def test_tensors_that_are_missing_or_belong_to_nothing(saved: Callable[[str], Saved]) -> None:
    one = saved("head")
    one.write({**one.tensors, "9.keys": torch.zeros(1)}, one.description)
    with pytest.raises(ValueError, match=r"9\.keys belongs to no layer"):
        one.rnns[0].load_state(one.path)
    one.write({name: t for name, t in one.tensors.items() if name != "1.seen"}, one.description)
    with pytest.raises(ValueError, match=r"1\.seen is missing"):
        one.rnns[0].load_state(one.path)


def test_a_flipped_bit_is_noticed(saved: Callable[[str], Saved]) -> None:
    """A key that is a little off would answer a little wrong, and nobody would know."""
    one = saved("head")
    flipped = bytearray(one.whole)
    flipped[-5] ^= 1
    one.path.write_bytes(flipped)
    with pytest.raises(ValueError, match="damaged"):
        one.rnns[0].load_state(one.path)
    bare = {name: value for name, value in one.description.items() if name != "checksum"}
    one.path.write_bytes(to_bytes(one.tensors, {"msrnn": json.dumps(bare)}))  # as states were saved before
    assert one.rnns[0].load_state(one.path).seen.tolist() == [17, 17]


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_states_are_no_views_of_the_file(kind: str, saved: Callable[[str], Saved]) -> None:
    one = saved(kind)
    one.path.write_bytes(one.whole)
    state = one.rnns[0].load_state(one.path)
    with one.path.open("r+b") as file:  # in place, as `cp` overwrites a file
        file.write(os.urandom(len(one.whole)))
    more = tokens(2, 9, seed=4)
    assert torch.equal(one.rnns[0].read(more, state), one.rnns[0].read(more, one.state.fork(1)))


# Mutations ------------------------------------------------------------------------------------------------------------
