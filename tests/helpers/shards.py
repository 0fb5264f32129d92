"""Shards of processes that are not there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Others:
    """The first of some processes; the others have these tensors."""

    tensors: list[Tensor]
    rank: int = 0
    capturable: bool = False

    @property
    def count(self) -> int:
        return 1 + len(self.tensors)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.add_(sum(self.tensors))

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat([tensor, *self.tensors], dim)
