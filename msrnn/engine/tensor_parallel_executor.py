"""The tensor parallel executor: the leader rank sends each call to all ranks of a model.

Only the leader rank has an engine, samples tokens and serves clients. It sends each call of a model or a state to the
other ranks, and all ranks compute it with their own heads. So no rank decides by itself, by its clock, free memory or
files.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.engine.executor import Executor, Place, SampledTokens, Sampler, SamplerSpec, StateHandle, WarmUp
from msrnn.engine.local_executor import LocalState, require_logits
from msrnn.engine.prompt_logprobs import score_block
from msrnn.engine.rank import PATIENCE, SHARED_ERRORS, STOP, Rank
from msrnn.engine.requests import Logprobs
from msrnn.engine.retention import Retention
from msrnn.errors import LostRankError
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.tensor_parallel import naming_lost_ranks
from msrnn.recall import Recalling


class SharedState:
    """A state of all ranks: its number, and the leader's own part."""

    def __init__(self, executor: TensorParallelExecutor, number: int, own: LocalState) -> None:
        self.executor, self.number, self.own = executor, number, own

    @property
    def seen(self) -> int:
        return self.own.seen

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    @property
    def archive_nbytes(self) -> int:
        return self.own.archive_nbytes

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.own.fingerprint

    @property
    def has_logits(self) -> bool:
        return self.own.has_logits


class TensorParallelExecutor(Executor):
    """Computes in all processes that share a model. The leader rank makes it; the others call `follow`.

    slots  of the decode batch; by default as many as fit in every rank, 8 on a CPU
    """

    def __init__(self, rnn: MultiStateRNN, slots: int | None = None) -> None:
        self._rank = Rank(rnn)
        self._lock = threading.RLock()  # every rank works in the one order of the messages
        self._numbers = count()
        self._dropped: list[int] = []
        self._lost: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._stay_in_touch, name="msrnn leader", daemon=True).start()
        self._do("start", slots)
        self.facts = self._rank.local.facts

    def __repr__(self) -> str:
        return f"TensorParallelExecutor({self._rank.rnn!r}, slots={self.facts.slots})"

    def _do(self, name: str, *arguments: Any) -> Any:
        """Call a method of `Rank` in all ranks."""
        with self._lock:
            if self._lost is not None:
                raise LostRankError("the processes of this job no longer work together: start it again") from self._lost
            try:
                self._send(name, *arguments)
                return getattr(self._rank, name)(*arguments)
            except SHARED_ERRORS:
                raise
            except BaseException as error:
                self._lost = error
                raise

    def _send(self, name: str, *arguments: Any) -> None:
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]  # others may drop more meanwhile
        with naming_lost_ranks(self._rank.shards):
            dist.broadcast_object_list([(dropped, name, arguments)], self._rank.leader, group=self._rank.messages)

    def _make(self, name: str, *arguments: Any) -> SharedState:
        """Make a state in all ranks. The other ranks drop their part when the leader's handle is deleted."""
        number = next(self._numbers)
        self._do(name, number, *arguments)
        state = SharedState(self, number, self._rank.states.pop(number))  # the handle holds the leader's own part
        weakref.finalize(state, self._dropped.append, number)
        return state

    def _check_own(self, state: StateHandle) -> SharedState:
        """The state behind a handle. Numbers of another executor name other states."""
        if not isinstance(state, SharedState) or state.executor is not self:
            raise TypeError(f"{state!r}: not a state of this executor")
        return state

    @contextmanager
    def _lend_number(self, state: StateHandle) -> Iterator[int]:
        """The number of a state, which all ranks know meanwhile."""
        mine = self._check_own(state)
        with self._lock:
            self._rank.states[mine.number] = mine.own
            try:
                yield mine.number
            finally:
                del self._rank.states[mine.number]

    def _stay_in_touch(self) -> None:
        while not self._ended.wait(PATIENCE.total_seconds() / 4):
            try:
                self._do("keep_alive")
            except Exception:  # the next call raises it
                return

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            if self._lost is None:
                self._send(STOP)
                self._lost = RuntimeError("this engine was closed")

    def check_length(self, tokens: int) -> None:
        self._rank.local.check_length(tokens)

    def stop_tokens(self, tokenizer: Any) -> frozenset[int]:
        return self._rank.local.stop_tokens(tokenizer)

    def plan_warm_up(self, prompt_tokens: int, guesses: int = 0) -> list[WarmUp]:
        return self._rank.local.plan_warm_up(prompt_tokens, guesses)

    def warm_up(self, part: WarmUp) -> None:
        self._do("warm_up", part)

    def new_state(self, size: int | None = None) -> SharedState:
        return self._make("new_state", size)

    def read(
        self,
        state: StateHandle,
        tokens: Sequence[int],
        logprobs: int | None = None,
        protect: bool = False,
        recalling: Recalling | None = None,
    ) -> list[Logprobs | None]:
        before = self._check_own(state).own.logits
        with self._lend_number(state) as number:
            logits: Tensor = self._do("read", number, [*tokens], logprobs is None, protect, recalling)
        return [] if logprobs is None else score_block(logits, before, tokens, logprobs)

    def check_size(self, size: int) -> None:
        self._rank.local.check_size(size)

    def check_protect(self, tokens: int, state: StateHandle | None = None, size: int | None = None) -> None:
        self._rank.local.check_protect(tokens, None if state is None else self._check_own(state).own, size)

    def release(self, state: StateHandle) -> None:
        with self._lend_number(state) as number:
            self._do("release", number)

    def copy(self, state: StateHandle, place: Place, wait: bool = True) -> SharedState:
        with self._lend_number(state) as source:
            return self._make("copy", source, place)

    def convert(self, state: StateHandle) -> SharedState:
        """Ranks know states by their numbers with one executor, so those of another cannot be converted."""
        return self._check_own(state)

    def save(self, state: StateHandle, path: Path, notes: Mapping[str, Any]) -> None:
        """The leader writes the heads of all ranks."""
        with self._lend_number(state) as number:
            whole: MultiState = self._do("gather", number)
        whole.save(path, dict(notes))

    def load(self, path: Path) -> SharedState:
        return self._make("load", str(path))

    def describe(self, path: Path) -> dict[str, Any]:
        return self._rank.local.describe(path)

    def retention(self, state: StateHandle) -> Retention:
        return self._rank.local.retention(self._check_own(state).own)

    def slot_retention(self, slot: int) -> Retention:
        return self._rank.local.slot_retention(slot)

    def new_sampler(self, state: StateHandle, spec: SamplerSpec) -> Sampler:
        return self._rank.local.new_sampler(self._check_own(state).own, spec)

    def put(self, slot: int, state: StateHandle, samplers: Sequence[Sampler]) -> SampledTokens:
        with self._lend_number(state) as number:
            for i in range(len(samplers)):
                self._do("put", slot + i, number)
        logits = require_logits(self._check_own(state).own)
        return self._rank.local.sample(logits.expand(len(samplers), -1), samplers, slot)

    def step(self, samplers: Sequence[Sampler]) -> SampledTokens:
        return self._rank.local.sample(self._do("step", len(samplers)), samplers, 0)

    def move(self, source: int, target: int) -> None:
        self._do("move", source, target)

    def take(self, slot: int, seen: int) -> SharedState:
        return self._make("take", slot, seen)

    def free(self, slot: int) -> None:
        if self.facts.recall is not None:  # otherwise, nothing is freed
            self._do("free", slot)
