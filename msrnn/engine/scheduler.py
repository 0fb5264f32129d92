"""The loop that owns the device: prompts are read in blocks between decode steps, then join the batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Any

from msrnn.engine.batch import Batch
from msrnn.engine.executor import Executor
from msrnn.engine.prompts import Prompts, Reading
from msrnn.engine.requests import Event, Request, explain
from msrnn.engine.running import Running, seed_of
from msrnn.engine.session_id import SessionId
from msrnn.engine.writer import written
from msrnn.errors import SessionError, UsageError

PROMPT_TOKENS = {"cpu": 512, "cuda": 2048}  # of prompts that are read between two decode steps
INTERRUPTED = "the engine was interrupted; ask again"
ALONE = {"cpu": 2048, "cuda": 8192}  # of a prompt that are read at once while no answer is generated


class Scheduler:
    """Requests that wait, are read, and are answered; `step` takes all of them one step further.

    lanes  schedulers that share one thread and the sessions, and take turns
    """

    def __init__(self, executor: Executor, prompts: Prompts, tokenizer: Any, prompt_tokens: int | None) -> None:
        device = executor.facts.device
        self.executor, self.prompts, self.tokenizer = executor, prompts, tokenizer
        self.prompt_tokens = prompt_tokens or PROMPT_TOKENS.get(device, PROMPT_TOKENS["cpu"])
        self._alone = max(self.prompt_tokens, ALONE.get(device, ALONE["cpu"]))
        self._own_stops = executor.stop_tokens(tokenizer)
        self.under_way: dict[Request, None] = {}  # taken from those that wait, and not finished
        self._batch = Batch(executor, self._keep)
        self.lanes: Sequence[Scheduler] = [self]

    def add(self, request: Request) -> None:
        self.prompts.waiting.append(request)

    @property
    def idle(self) -> bool:
        return not any(lane.has_work for lane in self.lanes)

    @property
    def computes(self) -> bool:
        return bool(self.prompts.readings or self._batch.running)

    @property
    def has_work(self) -> bool:
        return bool(self.prompts.waiting or self.computes or self._batch.saving)

    @property
    def capacity(self) -> int:
        """Answers that can be generated at once."""
        return sum(lane.executor.facts.slots for lane in self.lanes)

    @property
    def counts(self) -> dict[str, int]:
        """How many requests wait, how many are being read, and how many batch slots are in use."""
        waiting, reading = len(self.prompts.waiting), len(self.prompts.readings)
        return {"waiting": waiting, "reading": reading, "rows": len(self._batch.running)}

    def step(self) -> list[Event]:
        """Read some of the waiting prompts, and let every running answer have one more token."""
        try:
            events = self.drop_cancelled()
            self._batch.step()
            events += self._read_prompts()
            events += self._batch.results()
            events += self._batch.saved(busy=any(lane.computes for lane in self.lanes))
        except BaseException:
            self._fail()
            raise
        self._forget_finished(events)
        return events

    def _forget_finished(self, events: list[Event]) -> None:
        for event in events:
            if event.request.finished:
                self._forget(event.request)

    def _forget(self, request: Request) -> None:
        """A request that is no longer under way does not use its session."""
        if request in self.under_way:
            del self.under_way[request]
            if request.session is not None:
                self.prompts.sessions.end(request.session)

    def _fail(self) -> None:
        """End everything that is under way: a step that was interrupted leaves states that cannot be used."""
        saving = self._batch.saving.requests  # these have given their slots back
        for request in self.under_way.keys() - saving:
            request.fail(INTERRUPTED)
            self._forget(request)
        self._batch.clear()
        self.prompts.readings.clear()

    def drop_cancelled(self) -> list[Event]:
        events = self._batch.drop_cancelled()
        for request in self.prompts.drop_cancelled():
            for number, answer in enumerate(request.answers):
                answer.finish_reason = "cancelled"
                events.append(Event(request, number, None, "", None, "cancelled"))
        self._forget_finished(events)
        return events

    def _read_prompts(self) -> list[Event]:
        """Read prompts, as many tokens as a step may: few while answers are generated, so that these go on."""
        events: list[Event] = []
        left, others = self.prompt_tokens, any(lane.has_work for lane in self.lanes if lane is not self)
        while left > 0:
            events += self._begin_prompts()
            reading = self.prompts.next_reading()
            if reading is None:
                break
            if not reading.finished:
                alone = not (self._batch.running or others)
                if not alone and reading.left > left < self.prompt_tokens:
                    break  # it goes on with the next step: pieces of few widths fit few graphs
                left -= self.prompts.read(reading, max(left, self._alone) if alone else left)
            if reading.finished:
                self.prompts.readings.remove(reading)
                events += self._join(reading)
        return events

    def _begin_prompts(self) -> list[Event]:
        """Begin to read waiting prompts, if there are batch slots for their answers."""
        events: list[Event] = []
        while (request := self.prompts.take(self._free_slots)) is not None:
            request.begun = monotonic()
            try:
                if request.session is not None:
                    self._use_session(request.session)
                self.under_way[request] = None
                self.prompts.begin(request)
            except (UsageError, OSError) as error:  # its session cannot go on, which is not the others' fault
                events += request.fail(*explain(error))
                self._forget(request)
            except BaseException:
                request.fail(INTERRUPTED)  # it no longer waits, and may not be under way yet
                self._forget(request)
                raise
        return events

    @property
    def _free_slots(self) -> int:
        reserved = sum(reading.request.params.n for reading in self.prompts.readings)
        return self.executor.facts.slots - len(self._batch.running) - reserved

    def _use_session(self, session: SessionId) -> None:
        if self.uses_session(session):
            raise SessionError("is answering another request", session, advice="wait for its end")
        self.prompts.sessions.begin(session, self.executor.facts.slot_nbytes)

    def uses_session(self, session: str | SessionId) -> bool:
        """Whether a request of this conversation is under way."""
        under_way = (request for lane in self.lanes for request in [*lane.under_way])
        return any(request.session == SessionId.of(session) for request in under_way)

    def stop_session(self, session: str | SessionId) -> bool:
        """End the answer of a conversation as it is, so that the turn is kept; returns whether there is one."""
        session = SessionId.of(session)
        under_way = [request for lane in self.lanes for request in [*lane.under_way]]
        waiting = [request for lane in self.lanes for request in [*lane.prompts.waiting]]
        found = [request for request in [*under_way, *waiting, *self._arrived()] if request.session == session]
        for request in found[:1]:
            request.stop()
        return bool(found)

    def _arrived(self) -> list[Request]:
        """Requests that are to be added before the next step."""
        return []

    def _join(self, reading: Reading) -> list[Event]:
        """Give the answers of a prompt their batch slots; returns their ends, if none is generated."""
        request = reading.request
        if ends := request.ends_unanswered():
            return ends
        try:
            joined = [self._running(reading, number) for number in range(request.params.n)]
        except Exception as error:  # its parameters', which is not the others' fault
            return request.fail(*explain(error))
        self._batch.join(joined, reading.state)
        return []

    def _running(self, reading: Reading, number: int) -> Running:
        """An answer to a prompt that has been read."""
        request = reading.request
        own = frozenset[int]() if request.params.ignore_eos else self._own_stops
        seen = 0 if request.session is None else request.kept_tokens
        seed = seed_of(request, number)
        sampler = self.executor.new_sampler(reading.state, request.params, seed, request.prompt)
        return Running(request, number, reading.tokens, seen, self.tokenizer, own, sampler)

    def _keep(self, running: Running, slot: int) -> Future[None] | None:
        """Keep the state of a slot whose answer has ended, for its session or for requests that begin alike.

        Returns when the session is saved, or why it is not.
        """
        request, read = running.request, running.read
        if request.session is not None:
            try:
                state = self.executor.take(slot, running.seen + len(read))
                turn, follows = (state, running.unread, running.last), (request.turns, request.created)
                return self.prompts.sessions.put(request.session, *turn, follows)
            except (UsageError, OSError) as error:
                return written(error)
        if running.reads and self.prompts.prefixes.keeps_ends:
            self.prompts.prefixes.put(read, self.executor.take(slot, len(read)), owner=request.owner)
        return None
