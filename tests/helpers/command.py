"""Shared by the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

TEXT = "A text of more than sixty-four tokens, which is more than this tokenizer says it can take. " * 3


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def same(a: Path, b: Path) -> bool:
    """Whether two files hold the same state, the order of slots aside."""
    one, other = load_file(a), load_file(b)
    pairs = ((_ordered(one, name), _ordered(other, name)) for name in one)
    return one.keys() == other.keys() and all(torch.allclose(x, y, atol=1e-4) for x, y in pairs)


def _ordered(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor of one row and one group, its slots by position; free slots are left out."""
    position = state[name.split(".")[0] + ".position"][0, 0]
    order = position.argsort()[(position < 0).sum() :]
    tensor = state[name]
    if ".guest_" in name or ".archive." in name:  # in the order of the text already
        return tensor
    return tensor if tensor.ndim == 1 else tensor.index_select(2, order)
