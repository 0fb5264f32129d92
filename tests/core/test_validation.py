"""Manipulated states: each is refused with one line before it is saved or after it was loaded, or it works."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import msrnn
from msrnn.core.state_file import load_description
from tests.helpers.saved_states import SMALL, Saved
from tests.helpers.tiny import build, llama, tokens

FORGED: dict[str, tuple[str, dict[str, Callable[[Tensor], Any]], str]] = {
    "no free slot": ("head", {"position": lambda p: p[0, 0].copy_(torch.arange(7))}, "no slot is free"),
    "beyond what was read": ("head", {"position": lambda p: p.clamp_(min=17)}, "17 is not the position of a token"),
    "below -1": ("head", {"position": lambda p: p[p < 0].numel() and p.clamp_(max=-2)}, "-2 is not the position"),
    "held twice": (
        "head",
        {"position": lambda p: p[1, 1].fill_(3)[6:].fill_(-1)},
        "sequence 1: 3 is a position .* twice",
    ),
    "too few": ("head", {"position": lambda p: p[0, 0, :6].fill_(-1)}, "too few for size 6"),
    "none of a window": ("horizon", {"position": lambda p: p.fill_(-1)}, "0 tokens are held"),
    "other count": ("head", {"seen": lambda s: s.add_(100)}, "117 tokens of 17 columns|100 tokens"),
    "importance": ("head", {"importance": lambda i: i.fill_(torch.nan)}, "nan is not an importance"),
    "negative importance": ("head", {"importance": lambda i: i.fill_(-1.0)}, "-1 is not an importance"),
    "infinite importance": ("head", {"importance": lambda i: i.fill_(torch.inf)}, "inf is not an importance"),
    "huge importance": ("head", {"importance": lambda i: i.fill_(1e9)}, "1e.09 is not an importance"),
    "norm": ("value", {"row_weight": lambda n: n.fill_(torch.nan)}, "nan is not the norm"),
    "another norm": ("value", {"row_weight": lambda n: n.mul_(2)}, "is not the norm"),
    "scale of 0": ("value", {"key_scale": lambda s: s.zero_()}, "0 scales the keys"),
    "negative scale": ("value", {"value_scale": lambda s: s.neg_()}, "scales the values"),
    "infinite scale": ("value", {"key_scale": lambda s: s.fill_(torch.inf)}, "inf scales the keys"),
    "keys": ("head", {"keys": lambda k: k.fill_(torch.inf)}, "keys that are not finite"),
    "values": ("full", {"values": lambda v: v.fill_(torch.nan)}, "values that are not finite"),
    "codes": ("fp8", {"keys": lambda k: k.view(torch.uint8).fill_(0x7F)}, "keys that are not finite"),
    "out of order": ("full", {"position": lambda p: p[0, 0, :2].copy_(torch.tensor([1, 0]))}, "out of order"),
    "column not read": ("full", {"position": lambda p: p[0, 0].copy_(p[0, 0].roll(1))}, "17|column that was not read"),
    "lost": ("full", {"position": lambda p: p[0, 0, 16].fill_(-1)}, "not all that were read"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_tensors_are_refused(name: str, saved: Callable[[str], Saved]) -> None:
    kind, edits, message = FORGED[name]
    one = saved(kind)
    one.edited(**edits)
    with pytest.raises(ValueError, match=message) as error:
        one.rnns[0].load_state(one.path)
    assert str(error.value).startswith(str(one.path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rows", [0, 1, 16, 63])
def test_growing_rows_must_agree(rows: int, saved: Callable[[str], Saved]) -> None:
    one = saved("full")
    one.write({**one.tensors, "0.keys": one.tensors["0.keys"][:, :, :rows].contiguous()}, one.description)
    with pytest.raises(ValueError, match=r"keys: .* not .* 64, 8"):
        one.rnns[0].load_state(one.path)
    cut = {name: t[:, :, :rows].contiguous() if t.ndim > 1 else t for name, t in one.tensors.items()}
    one.write(cut, one.description)
    if rows >= 17:
        assert one.rnns[0].load_state(one.path).seen.tolist() == [17, 17]
    else:
        with pytest.raises(ValueError, match="not a usable state"):
            one.rnns[0].load_state(one.path)


def test_numbers_that_cannot_be_loaded_are_not_saved(tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(2, 2, **SMALL)), "h2o", 6, backend="torch")
    state = rnn.state(3)
    rnn.read(tokens(3, 5), state)
    state.layers[1].importance[1] = torch.nan
    with pytest.raises(ValueError, match=r"layer 1, sequence 1: nan is not an importance .*; save the other sequences"):
        state.save(tmp_path / "state")
    assert os.listdir(tmp_path) == []
    state.select([0, 2]).save(tmp_path / "state")
    assert rnn.load_state(tmp_path / "state").batch_size == 2


@pytest.mark.parametrize("kind", ["head", "value", "fp8", "full"])
def test_what_free_slots_hold_means_nothing(kind: str, saved: Callable[[str], Saved], tmp_path: Path) -> None:
    one = saved(kind)
    plain, state = one.rnns[0].state(2), one.rnns[0].state(2)
    for each in (plain, state):
        one.rnns[0].read(tokens(2, 3), each)
    for layer in state.layers:
        bits = layer.keys.view(torch.int8) if layer.keys.itemsize == 1 else layer.keys
        bits[:, :, -1] = 0x7F if layer.keys.itemsize == 1 else torch.nan
        if kind == "value":
            layer.key_scale[:, :, -1] = layer.row_weight[:, :, -1] = layer.importance[:, :, -1] = torch.nan
    state.save(tmp_path / "state")
    more = tokens(2, 12, seed=4)
    loaded = one.rnns[0].load_state(tmp_path / "state")
    torch.testing.assert_close(one.rnns[0].read(more, loaded), one.rnns[0].read(more, plain), atol=1e-4, rtol=1e-4)


def test_a_horizon_that_was_lifted_can_be_saved(tmp_path: Path) -> None:
    """Such a state holds fewer tokens than its size has room for, and says so in its file."""
    model = build(llama(2, 2, **SMALL))
    near, free = (msrnn.MultiStateRNN(model, policy, 6) for policy in ("h2o+1~8", "h2o+1"))
    state = free.state()
    free.read(tokens(1, 60), state)
    begun = near.convert_state(state)
    near.step(tokens(1, 1), begun)  # a horizon that begins late drops many tokens at once
    adopted = free.convert_state(begun)
    assert min(int((layer.position >= 0).sum(-1).min()) for layer in adopted.layers) < 6
    adopted.save(tmp_path / "state")
    assert load_description(tmp_path / "state")["incomplete"] is True
    assert torch.equal(free.load_state(tmp_path / "state").positions(0), adopted.positions(0))


def test_more_tokens_than_positions_can_count(saved: Callable[[str], Saved]) -> None:
    one = saved("horizon")
    many = {**one.tensors, "0.seen": torch.full((2,), 2**31)}
    one.write(many, {**one.description, "columns": [2**31]})
    with pytest.raises(ValueError, match="tokens of 2147483648 columns"):
        one.rnns[0].load_state(one.path)
