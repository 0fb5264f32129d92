"""One engine over the processes that share a model: the first one leads, the others follow.

The leader runs the engine, samples tokens and speaks with clients. Before it computes with the model or with a state,
it tells the others what, and all of them do the same with their own heads. Only the leader decides, so nothing depends
on what the processes would decide by themselves: the clock, free memory, files that are being written.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.engine.engine import Engine
from msrnn.engine.rows import Rows, fitting_rows
from msrnn.errors import UsageError
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.tensor_parallel import LostRankError, ProcessShards, naming_lost_ranks

PATIENCE = timedelta(minutes=2)  # a process that does not answer for so long is lost
STOP = "stop"
ALIKE = UsageError, OSError  # what fails in every process in the same way, and harms nothing else


class Work:
    """What all processes do when the leader says so. States have numbers, by which the leader names them."""

    def __init__(self, rnn: MultiStateRNN) -> None:
        shards = rnn.spec.model.shards
        if not isinstance(shards, ProcessShards):
            raise UsageError("this model is in one process: use msrnn.Engine, or load it with a tp_plan under torchrun")
        self.rnn, self.shards = rnn, shards
        self.states: dict[int, MultiState] = {}
        self.rows: Rows
        # Messages are Python objects, which NCCL cannot carry. All processes must make this group together.
        self.messages = dist.new_group(dist.get_process_group_ranks(shards.group), PATIENCE, backend="gloo")
        self.leader = dist.get_process_group_ranks(shards.group)[0]

    def make_rows(self, rows: int | None) -> Rows:
        self.rows = Rows(self.rnn, rows or fitting_rows(self.rnn))
        return self.rows

    def new_state(self, number: int) -> None:
        self.states[number] = self.rnn.state()

    def load(self, number: int, path: str) -> None:
        self.states[number] = self.rnn.load_state(path)

    def copy(self, source: int, number: int, device: str) -> None:
        self.states[number] = MultiState.to(self.states[source], device)

    def gather(self, number: int) -> MultiState:
        state = self.states[number]
        if state.device != self.rnn.device:  # the backend of the model's device carries it
            state = MultiState.to(state, self.rnn.device)
        return MultiState.gathered(state)

    def read(self, number: int, ids: list[list[int]], last_only: bool) -> Tensor:
        return self.rnn.read(torch.tensor(ids, device=self.rnn.device), self.states[number], last_only=last_only)

    def step(self, count_: int) -> Tensor:
        tokens = self.rows.next[:count_].contiguous()
        dist.broadcast(tokens, self.leader, group=self.shards.group)
        self.rows.next[:count_] = tokens
        return Rows.step(self.rows, count_)

    def put(self, row: int, number: int) -> None:
        Rows.put(self.rows, row, self.states[number])

    def move(self, source: int, target: int) -> None:
        Rows.move(self.rows, source, target)

    def take(self, row: int, seen: int, number: int) -> None:
        self.states[number] = Rows.take(self.rows, row, seen)

    def nothing(self) -> None:
        """A sign of life."""


def follow(rnn: MultiStateRNN) -> None:
    """Do what the leader says, until it stops. Raises a `LostRankError` when the leader has ended or is silent."""
    work = Work(rnn)
    while True:
        message: list[Any] = [None]
        with naming_lost_ranks(work.shards):
            dist.broadcast_object_list(message, work.leader, group=work.messages)
        dropped, name, arguments = message[0]
        for number in dropped:
            work.states.pop(number, None)
        if name == STOP:
            return
        try:
            getattr(work, name)(*arguments)
        except ALIKE:
            continue


class Leader:
    """The first process: `do` tells the others, and does the same here."""

    def __init__(self, rnn: MultiStateRNN) -> None:
        self.work = Work(rnn)
        self._lock = threading.RLock()  # every process works in the one order of the messages
        self._numbers = count()
        self._dropped: list[int] = []
        self._lost: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._stay_in_touch, name="msrnn leader", daemon=True).start()

    def do(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            if self._lost is not None:
                raise LostRankError("the processes of this job no longer work together: start it again") from self._lost
            try:
                self._tell(name, *arguments)
                return getattr(self.work, name)(*arguments)
            except ALIKE:
                raise
            except BaseException as error:
                self._lost = error
                raise

    def _tell(self, name: str, *arguments: Any) -> None:
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]  # others may drop more meanwhile
        with naming_lost_ranks(self.work.shards):
            dist.broadcast_object_list([(dropped, name, arguments)], self.work.leader, group=self.work.messages)

    def new(self, name: str, *arguments: Any, last: tuple[Any, ...] = ()) -> SharedState:
        """Do what makes a state. The others forget theirs when nobody here has it any more."""
        number = next(self._numbers)
        self.do(name, *arguments, number, *last)
        state: Any = self.work.states.pop(number)  # the leader's own is held by those who use it
        state.__class__ = SharedState
        state.leader, state.number = self, number
        weakref.finalize(state, self._dropped.append, number)
        return state  # type: ignore[no-any-return]

    def with_state(self, state: MultiState, work: Callable[[int], Any]) -> Any:
        """Work with the number of a state, which all processes know meanwhile."""
        assert isinstance(state, SharedState)
        with self._lock:
            self.work.states[state.number] = state
            try:
                return work(state.number)
            finally:
                del self.work.states[state.number]

    def _stay_in_touch(self) -> None:
        while not self._ended.wait(PATIENCE.total_seconds() / 4):
            try:
                self.do("nothing")
            except Exception:  # whoever works next is told
                return

    def stop(self) -> None:
        """Let the other processes end."""
        self._ended.set()
        with self._lock:
            if self._lost is None:
                self._tell(STOP)
                self._lost = RuntimeError("this engine was closed")


class SharedState(MultiState):
    """The leader's part of a state."""

    leader: Leader
    number: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MultiState:
        leader = self.leader
        return leader.with_state(self, lambda number: leader.new("copy", number, last=(str(device),)))  # type: ignore[no-any-return]

    def gathered(self) -> MultiState:
        leader = self.leader
        return leader.with_state(self, lambda number: leader.do("gather", number))  # type: ignore[no-any-return]

    def save(self, path: str | os.PathLike[str], notes: dict[str, Any] | None = None) -> None:
        self.gathered().save(path, notes)


class LeadingRNN:
    """A `MultiStateRNN` whose states are shared; everything else is that of the leader's own."""

    def __init__(self, rnn: MultiStateRNN) -> None:
        self._rnn, self.leader = rnn, Leader(rnn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rnn, name)

    def state(self) -> MultiState:
        return self.leader.new("new_state")

    def load_state(self, path: str | os.PathLike[str]) -> MultiState:
        return self.leader.new("load", last=(os.fspath(path),))

    def read(self, input_ids: Tensor, state: MultiState, last_only: bool = True) -> Tensor:
        ids = input_ids.tolist()
        logits: Tensor = self.leader.with_state(state, lambda number: self.leader.do("read", number, ids, last_only))
        return logits


class LeadingRows(Rows):
    """The rows of all processes."""

    leader: Leader

    def step(self, count: int) -> Tensor:
        logits: Tensor = self.leader.do("step", count)
        return logits

    def put(self, row: int, state: MultiState) -> None:
        self.leader.with_state(state, lambda number: self.leader.do("put", row, number))

    def move(self, source: int, target: int) -> None:
        self.leader.do("move", source, target)

    def take(self, row: int, seen: int) -> MultiState:
        return self.leader.new("take", row, seen)


class LeadingEngine(Engine):
    """An `Engine` over the processes that share a model; the others call `follow`."""

    def __init__(self, rnn: MultiStateRNN, rows: int | None = None, **options: Any) -> None:
        self._leading = LeadingRNN(rnn)
        super().__init__(self._leading, rows, **options)  # type: ignore[arg-type]

    def _make_rows(self, rows: int | None) -> Rows:
        leader = self._leading.leader
        made: Any = leader.do("make_rows", rows)
        made.__class__ = LeadingRows
        made.leader = leader
        return made  # type: ignore[no-any-return]

    def close(self) -> None:
        super().close()
        self._leading.leader.stop()
