"""Decisions: the rows that a layer may evict at some moment, what is known of them, and what evicting them costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from msrnn.core.atomic import write_atomically


class Decisions(NamedTuple):
    """N moments of L layers of the same shape, with K KV heads in G groups and C candidates each."""

    inputs: Tensor  # [N, L, K, C, I] float16 or float32: what the networks see
    importance: Tensor  # [N, L, G, C] float32: the logarithm of the importance
    norm: Tensor  # [N, L, G, C] float32: the logarithm of the norm of the values
    change: Tensor  # [N, L, G, C] float32: the change of the outputs in the future, if the row is missing

    def at(self, index: Tensor) -> Decisions:
        """Some of the moments."""
        return Decisions(*(tensor[index] for tensor in self))

    def to(self, device: torch.device) -> Decisions:
        return Decisions(*(tensor.to(device) for tensor in self))

    @property
    def moments(self) -> int:
        """The number of moments."""
        return len(self.inputs)


Stacks = Sequence[Decisions]  # of the layers of each shape


def join(parts: Sequence[Stacks]) -> list[Decisions]:
    """The moments of several parts."""
    return [Decisions(*map(torch.cat, zip(*stacks, strict=True))) for stacks in zip(*parts, strict=True)]


def save_decisions(path: Path, stacks: Stacks) -> None:
    tensors = {
        f"{i}.{name}": tensor.cpu().contiguous()
        for i, stack in enumerate(stacks)
        for name, tensor in stack._asdict().items()
    }
    write_atomically(path, lambda to: save_file(tensors, to))


def load_decisions(path: Path) -> list[Decisions] | None:
    """The decisions of a file; None: there is none, or it is damaged and has to be made again."""
    try:
        tensors: Mapping[str, Tensor] = load_file(path)
        names = list(Decisions.__annotations__)
        count = len(tensors) // len(names)
        return [Decisions(*(tensors[f"{i}.{name}"] for name in names)) for i in range(count)]
    except (OSError, SafetensorError, KeyError):
        return None
