"""A tensor parallel rank: one of the processes that share a model, and the calls that the leader rank sends to it.

A message of the leader has the name of a method of `Rank`, and its arguments. States are identified by numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.engine.executor import Place, WarmUp
from msrnn.engine.local_executor import LocalExecutor, LocalState
from msrnn.errors import UsageError
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.tensor_parallel import ProcessShards, naming_lost_ranks
from msrnn.recall import Recalling

PATIENCE = timedelta(minutes=2)  # a rank that does not answer for this time is lost
STOP = "stop"
SHARED_ERRORS = UsageError, OSError  # every rank fails in the same way, and all of them can continue


class Rank:
    """The model, the states by number and the decode batch of one process."""

    def __init__(self, rnn: MultiStateRNN) -> None:
        shards = rnn.spec.model.shards
        if not isinstance(shards, ProcessShards):
            raise UsageError("this model is in one process: use msrnn.Engine, or load it with a tp_plan under torchrun")
        self.rnn, self.shards = rnn, shards
        self.states: dict[int, LocalState] = {}
        self.local: LocalExecutor
        # Messages are Python objects, which NCCL cannot carry. All ranks must make this group together.
        self.messages = dist.new_group(dist.get_process_group_ranks(shards.group), PATIENCE, backend="gloo")
        self.leader = dist.get_process_group_ranks(shards.group)[0]

    def start(self, slots: int | None) -> None:
        self.local = LocalExecutor(self.rnn, slots)

    def warm_up(self, part: WarmUp) -> None:
        self.local.warm_up(part)

    def new_state(self, number: int, size: int | None = None) -> None:
        self.states[number] = self.local.new_state(size)

    def load(self, number: int, path: str) -> None:
        self.states[number] = self.local.load(Path(path))

    def copy(self, number: int, source: int, place: Place) -> None:
        self.states[number] = self.local.copy(self.states[source], place)

    def gather(self, number: int) -> MultiState:
        state = self.states[number].state
        if state.device != self.rnn.device:  # the backend of the model's device carries it
            state = state.to(self.rnn.device)
        return state.gather_heads(archives=self.shards.rank == 0)  # the leader saves them

    def read(
        self,
        number: int,
        tokens: Sequence[int],
        last_only: bool,
        protect: bool = False,
        recalling: Recalling | None = None,
    ) -> Tensor:
        return self.local.read_logits(self.states[number], tokens, last_only, protect, recalling)

    def release(self, number: int) -> None:
        self.local.release(self.states[number])

    def put(self, slot: int, number: int) -> None:
        self.local.batch.put(slot, self.states[number].state)

    def step(self, slots: int) -> Tensor:
        """A step with the leader's tokens -> logits [slots, V]."""
        batch = self.local.batch
        tokens = batch.next[:slots].contiguous()
        dist.broadcast(tokens, self.leader, group=self.shards.group)
        batch.next[:slots] = tokens
        return batch.step(slots)

    def move(self, source: int, target: int) -> None:
        self.local.move(source, target)

    def take(self, number: int, slot: int, seen: int) -> None:
        self.states[number] = self.local.take(slot, seen)

    def free(self, slot: int) -> None:
        self.local.free(slot)

    def keep_alive(self) -> None:
        """A sign of life."""


def follow(rnn: MultiStateRNN) -> None:
    """Serve the calls of the leader rank until it stops. Raises a `LostRankError` if the leader is lost."""
    rank = Rank(rnn)
    while True:
        message: list[Any] = [None]
        with naming_lost_ranks(rank.shards):
            dist.broadcast_object_list(message, rank.leader, group=rank.messages)
        dropped, name, arguments = message[0]
        for number in dropped:
            rank.states.pop(number, None)
        if name == STOP:
            return
        try:
            getattr(rank, name)(*arguments)
        except SHARED_ERRORS:
            continue
