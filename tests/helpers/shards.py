"""Shards of processes that are not there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier, Lock
from typing import TypeVar

import torch
from torch import Tensor

from msrnn.core.shards import Shards

Found = TypeVar("Found")


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


class Turns:
    """The processes of `run_in_turns`, as one of them sees the others."""

    capturable = False

    def __init__(self, rank: int, count: int, turn: Lock, barrier: Barrier, given: dict[int, Tensor]) -> None:
        self.rank, self.count = rank, count
        self._turn, self._barrier, self._given = turn, barrier, given

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(tensor), dim)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._given[self.rank] = tensor.clone()
        self._wait()
        found = [self._given[rank] for rank in range(self.count)]
        self._wait()
        return found

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait(timeout=60)
        finally:
            self._turn.acquire()


def run_in_turns(count: int, run: Callable[[Shards], Found]) -> list[Found]:
    """What `run` returns in each of `count` processes: threads, of which one computes at a time."""
    turn, barrier, given = Lock(), Barrier(count), dict[int, Tensor]()

    def run_one(rank: int) -> Found:
        with turn:
            try:
                return run(Turns(rank, count, turn, barrier, given))
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(count) as pool:
        return [one.result() for one in [pool.submit(run_one, rank) for rank in range(count)]]
