"""A layer whose heads are divided among processes, each of which holds the slots of its own heads."""

from __future__ import annotations

import hashlib
import os
from typing import Protocol

import torch
from torch import Tensor

from msrnn.errors import UsageError

CHECKS = os.environ.get("MSRNN_CHECK_SHARDS") == "1"  # whether all evictions are compared, which is slow


class Shards(Protocol):
    """The collective operations of the ranks. Every process must make the same calls, in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process, which has the heads after those of the ranks before it."""
        ...

    @property
    def count(self) -> int:
        """The number of processes, which have equally many heads each."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can contain these calls."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place: the same numbers, bit by bit, in all of them."""
        ...

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all processes, joined in the order of their ranks."""
        ...


def own_part(tensor: Tensor, dim: int, shards: Shards | None) -> Tensor:
    """The part of a gathered tensor that is this process's own."""
    return tensor if shards is None else tensor.chunk(shards.count, dim)[shards.rank]


def check_same(tensor: Tensor, shards: Shards, problem: str) -> None:
    """Refuse, in every process, a tensor that is not the same in all of them."""
    bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode() + bits).digest()[:8]
    number = int.from_bytes(digest, "little", signed=True)
    found = shards.gather(torch.tensor([number], device=tensor.device), 0).tolist()
    if len(set(found)) > 1:
        others = [rank for rank, other in enumerate(found) if other != found[0]]
        raise UsageError(f"{problem} (ranks {', '.join(map(str, others))} differ from rank 0)")


def least(number: int, shards: Shards | None, device: torch.device) -> int:
    """The least of the processes' numbers."""
    return number if shards is None else min(shards.gather(torch.tensor([number], device=device), 0).tolist())
