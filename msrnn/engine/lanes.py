"""An engine that reads past the training length: long requests have batch slots, a policy and positions of their own.

A decode batch has one RNN, whose positions all of its states have. So requests that may pass the training length are
answered by a second engine with few batch slots, the long lane. Both lanes share the sessions and one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrnn.core.fingerprint import RECALL, WEIGHTS
from msrnn.engine.engine import PREFIX_DISK_BYTES, PREFIX_HOST_BYTES, PREFIX_STATES, Engine, make_executor
from msrnn.engine.executor import Executor, StateHandle
from msrnn.engine.requests import Event, Request
from msrnn.engine.scheduler import Counts
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.hf.rnn import MultiStateRNN

SHARE = 4  # batch slots, and bytes of the prefix cache, for each one of the long lane


class LongEngine(Engine):
    """An `Engine` whose requests use `longer`, another RNN of the same model, where they may pass `length` tokens.

    A request may pass them if its session, its prompt and `max_tokens` together do. A session that may pass them is
    converted to `longer`, and is not converted back. All other requests are answered as by an `Engine` with `rnn`.

    length   tokens that `rnn` reads, usually the training length
    slots    batch slots of `rnn`; `longer` has a quarter as many, at least one
    on_long  called once, when the first request is added that uses `longer`
    """

    def __init__(
        self,
        rnn: MultiStateRNN | Executor,
        longer: MultiStateRNN | Executor,
        length: int,
        slots: int | None = None,
        *,
        on_long: Callable[[], object] = lambda: None,
        prefix_bytes: int | None = None,
        prefix_host_bytes: int = PREFIX_HOST_BYTES,
        prefix_archive_bytes: int | None = None,
        prefix_folder: str | os.PathLike[str] | None = None,
        prefix_disk_bytes: int = PREFIX_DISK_BYTES,
        **options: Any,
    ) -> None:
        self.length, self.on_long = length, on_long
        self.long_requests = 0
        self._long_is_next = False
        device, host, disk = (_long_share(n) for n in (prefix_bytes or 0, prefix_host_bytes, prefix_disk_bytes))
        archives = prefix_host_bytes if prefix_archive_bytes is None else prefix_archive_bytes
        short = make_executor(rnn, slots, others=1 / SHARE)
        share = None if isinstance(longer, Executor) else max(1, short.facts.slots // SHARE)
        self.long_executor = make_executor(longer, share)
        _check_pair(short, self.long_executor)
        super().__init__(
            short,
            prefix_bytes=None if prefix_bytes is None else prefix_bytes - device,
            prefix_host_bytes=prefix_host_bytes - host,
            prefix_archive_bytes=archives - _long_share(archives),
            prefix_folder=prefix_folder,
            prefix_disk_bytes=prefix_disk_bytes - disk,
            **options,
        )
        self.long = Engine(
            self.long_executor,
            prefix_bytes=PREFIX_STATES // SHARE * self.long_executor.facts.slot_nbytes
            if prefix_bytes is None
            else device,
            prefix_host_bytes=host,
            prefix_archive_bytes=_long_share(archives),
            prefix_folder=None if prefix_folder is None else Path(prefix_folder) / "long",
            prefix_disk_bytes=disk,
            **{**options, "sessions": self.sessions},
        )
        self.long.queue.convert = self.long_executor.convert
        self.long.grammars = self.grammars
        self.lanes = self.long.lanes = [self, self.long]

    def _load_session(self, path: Path) -> StateHandle:
        """The description in a session's file names its RNN."""
        found, long = self.executor.describe(path), self.long_executor.facts.fingerprint
        is_long = all(found.get(name) == long[name] for name in ("policy", "positions"))
        return (self.long_executor if is_long else self.executor).load(path)

    def request(self, *args: Any, **kwargs: Any) -> Request:
        request = super().request(*args, **kwargs)
        if self._is_long(request):
            n, most = request.params.n, self.long_executor.facts.slots
            if n > most:
                raise UsageError(
                    f"the engine has {most} batch slots for texts that may pass {self.length:,} tokens",
                    name="n",
                    value=n,
                    advice="ask for fewer answers",
                )
            self.long_executor.check_length(len(request.prompt) + request.params.max_tokens)
            if request.size is not None:
                self.long_executor.check_size(request.size)
            self.long_executor.check_protect(request.protect, size=request.size)
        return request

    def find_longest(self, most: int) -> int:
        found = super().find_longest(most)
        return found if found <= self.length else max(self.length, self.long.find_longest(found))

    def add(self, request: Request) -> None:
        if not self._is_long(request):
            return super().add(request)
        self.long_requests += 1
        if self.long_requests == 1:
            self.on_long()
        return self.long.add(request)

    def _is_long(self, request: Request) -> bool:
        info = None if request.session is None else self.sessions.info(request.session)
        if info is not None and info.positions == self.long_executor.facts.fingerprint["positions"]:
            return True
        before = 0 if info is None else info.tokens
        if before > self.length:  # an engine without lanes has read it with original positions, and it stays so
            return False
        return before + len(request.prompt) + request.params.max_tokens > self.length

    @property
    def counts(self) -> Counts:
        """Of both lanes together."""
        return Counts(*map(sum, zip(super().counts, self.long.counts, strict=True)))

    def step(self) -> list[Event]:
        """A step of one lane; the lanes alternate. So a step that fails ends the answers of one lane only."""
        long = self.long.has_work and (self._long_is_next or not self.has_work)
        self._long_is_next = not long
        return self.long.step() if long else super().step()

    def drop_cancelled(self) -> list[Event]:
        return [*super().drop_cancelled(), *self.long.drop_cancelled()]

    def warm_up(self, on_part: Callable[[str], None] | None = None) -> None:
        super().warm_up(on_part)
        self.long.warm_up(on_part)

    def close(self) -> None:
        super().close()
        self.long_executor.close()


def _check_pair(short: Executor, long: Executor) -> None:
    if long.facts.model is not short.facts.model:
        raise UsageError("longer: belongs to another model; make it from the model of rnn")
    positions = short.facts.fingerprint["positions"]
    if long.facts.fingerprint["positions"] == positions:
        raise UsageError(f"longer: has the positions of rnn, {positions!r}; give it others")
    for name, problem in (
        (RECALL, "recalls another number of rows than rnn"),
        (WEIGHTS, "has other row weights than rnn"),
    ):
        if long.facts.fingerprint.get(name) != short.facts.fingerprint.get(name):
            raise UsageError(f"longer: {problem}, and could not continue its sessions")


def _long_share(count: int) -> int:
    return count // (SHARE + 1)
