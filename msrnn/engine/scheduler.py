"""The scheduler: continuous batching with chunked prefill.

Requests wait in a queue, are prefilled in chunks between decode steps, and then join the decode batch. A running
request leaves the batch when its answer ends, and the next one takes its slot at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from msrnn.engine.batch import Batch
from msrnn.engine.executor import Executor, SamplerSpec
from msrnn.engine.guesses import FirstGuesser, Guesser, TextGuesser
from msrnn.engine.prefill import Prefill, PrefillQueue
from msrnn.engine.requests import Event, Request, SamplingParams, explain
from msrnn.engine.running_answer import RunningAnswer, seed_of
from msrnn.engine.session_id import SessionId
from msrnn.engine.writer import make_done_future
from msrnn.errors import SessionError, UsageError

if TYPE_CHECKING:
    from msrnn.engine.draft_model import DraftModel

PROMPT_TOKENS = {"cpu": 512, "cuda": 2048}  # prefill tokens between two decode steps
INTERRUPTED = "the engine was interrupted; ask again"
ALONE = {"cpu": 2048, "cuda": 8192}  # prefill tokens of a step while no answer is generated


class Counts(NamedTuple):
    """The requests that an engine has now, by stage."""

    waiting: int  # requests whose prefill has not begun
    prefill: int  # requests whose prompt is being read
    running: int  # batch slots in use


class Scheduler:
    """Schedules waiting requests, prefills and running answers; `step` advances all of them.

    lanes    schedulers that share one thread and the sessions; their steps alternate
    guesses  the most tokens that are guessed at once; 0: none
    """

    def __init__(
        self, executor: Executor, queue: PrefillQueue, tokenizer: Any, prompt_tokens: int | None, guesses: int = 0
    ) -> None:
        device = executor.facts.device
        self.guesses = guesses
        self.draft: DraftModel | None = None  # guesses where the text does not
        self.executor, self.queue, self.tokenizer = executor, queue, tokenizer
        self.prompt_tokens = prompt_tokens or PROMPT_TOKENS.get(device, PROMPT_TOKENS["cpu"])
        queue.groups.limit(self.prompt_tokens)
        self._alone = max(self.prompt_tokens, ALONE.get(device, ALONE["cpu"]))
        self._own_stops = executor.stop_tokens(tokenizer)
        self.under_way: dict[Request, None] = {}  # requests in prefill or running
        self._batch = Batch(executor, self._keep)
        self.lanes: Sequence[Scheduler] = [self]
        self.dropped_tokens = 0  # from archives that were full, while prompts and answers were read

    def add(self, request: Request) -> None:
        self.queue.waiting.append(request)

    @property
    def idle(self) -> bool:
        return not any(lane.has_work for lane in self.lanes)

    @property
    def computes(self) -> bool:
        return bool(self.queue.prefills or self._batch.running)

    @property
    def has_work(self) -> bool:
        return bool(self.queue.waiting or self.computes or self._batch.saving)

    @property
    def capacity(self) -> int:
        """Answers that can be generated at once."""
        return sum(lane.executor.facts.slots for lane in self.lanes)

    @property
    def counts(self) -> Counts:
        return Counts(len(self.queue.waiting), len(self.queue.prefills), len(self._batch.running))

    @property
    def archived_tokens(self) -> int:
        """Tokens in the archives of prefills and running answers; 0 where nothing is archived."""
        if self.executor.facts.recall is None:
            return 0
        lengths = [prefill.first + prefill.done for prefill in [*self.queue.prefills]]
        lengths += [running.length for running in [*self._batch.running]]
        return sum(map(self.executor.facts.count_archived, lengths))

    @property
    def archive_nbytes(self) -> int:
        """Bytes of these archives, and of those in the prefix cache; what several share counts for each."""
        running = self.archived_tokens * self.executor.facts.archived_row_nbytes
        return running + self.queue.prefixes.archive_nbytes

    def step(self) -> list[Event]:
        """Prefill a chunk of the waiting prompts, and decode one token of every running answer."""
        try:
            events = self.drop_cancelled()
            self._batch.step()
            for running in self._batch.running:
                self._count_dropped(running.length - 1, running.length)
            events += self._prefill()
            events += self._batch.results()
            events += self._batch.collect_saved(busy=any(lane.computes for lane in self.lanes))
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
                self.queue.sessions.end(request.session)

    def _fail(self) -> None:
        """End everything that is under way: a step that was interrupted leaves states that cannot be used."""
        saving = self._batch.saving.requests  # these have given their slots back
        for request in self.under_way.keys() - saving:
            request.fail(INTERRUPTED)
            self._forget(request)
        self._batch.clear()
        self.queue.prefills.clear()

    def drop_cancelled(self) -> list[Event]:
        events = self._batch.drop_cancelled()
        for request in self.queue.drop_cancelled():
            for number, answer in enumerate(request.answers):
                answer.finish_reason = "cancelled"
                events.append(Event(request, number, None, "", None, "cancelled"))
        self._forget_finished(events)
        return events

    def _prefill(self) -> list[Event]:
        """Prefill prompts in chunks: small ones while answers are generated, so that decode steps are not delayed."""
        events: list[Event] = []
        left, others = self.prompt_tokens, any(lane.has_work for lane in self.lanes if lane is not self)
        while left > 0:
            events += self._begin_prefills()
            full = bool(self._batch.running and self.queue.waiting) and self._free_slots <= 0
            chosen = self.queue.choose_next(may_wait=full)
            if not chosen:
                break
            total = sum(prefill.left for prefill in chosen)
            if total:
                alone = not (self._batch.running or others)
                if not alone and total > left < self.prompt_tokens:
                    break  # it continues in the next step: chunks of few widths need few CUDA graphs
                left -= self._read(chosen, max(left, self._alone) if alone else left)
            for prefill in chosen:
                if prefill.finished:
                    self.queue.prefills.remove(prefill)
                    events += self._join(prefill)
        return events

    def _read(self, chosen: Sequence[Prefill], most: int) -> int:
        """Read a chunk of one prefill, or all that is left of several; returns how many tokens."""
        if len(chosen) > 1:
            return self.queue.read_together(chosen)
        (prefill,) = chosen
        read = self.queue.read_chunk(prefill, most)
        end = prefill.first + prefill.done
        self._count_dropped(end - read, end)
        return read

    def _count_dropped(self, before: int, after: int) -> None:
        """Count what an archive dropped when its text grew from `before` to `after` tokens."""
        facts = self.executor.facts
        if facts.archived_tokens is not None:
            self.dropped_tokens += (after - before) - (facts.count_archived(after) - facts.count_archived(before))

    def _begin_prefills(self) -> list[Event]:
        """Begin the prefill of waiting requests, if there are batch slots for their answers."""
        events: list[Event] = []
        while (request := self.queue.take(self._free_slots)) is not None:
            request.begun = monotonic()
            try:
                if request.session is not None:
                    self._use_session(request.session, len(request.prompt))
                self.under_way[request] = None
                self.queue.begin(request)
            except (UsageError, OSError) as error:  # its session cannot be continued; other requests are not affected
                events += request.fail(*explain(error))
                self._forget(request)
            except BaseException:
                request.fail(INTERRUPTED)  # it left the queue, and may not be under way yet
                self._forget(request)
                raise
        return events

    @property
    def _free_slots(self) -> int:
        reserved = sum(prefill.request.params.n for prefill in self.queue.prefills)
        return self.executor.facts.slots - len(self._batch.running) - reserved

    def _use_session(self, session: SessionId, tokens: int) -> None:
        """Reserve a session, and memory for it with the next `tokens`; its archive grows with them."""
        if self.uses_session(session):
            raise SessionError("is answering another request", session, advice="wait for its end")
        facts, info = self.executor.facts, self.queue.sessions.info(session)
        archived = facts.archive_nbytes(tokens + (info.tokens if info else 0))
        self.queue.sessions.begin(session, facts.slot_nbytes + archived)

    def uses_session(self, session: str | SessionId) -> bool:
        """Whether a request of this session is in prefill or running."""
        under_way = (request for lane in self.lanes for request in [*lane.under_way])
        return any(request.session == SessionId.of(session) for request in under_way)

    def stop_session(self, session: str | SessionId) -> bool:
        """End the running answer of a session, and keep the turn; returns whether there is one."""
        session = SessionId.of(session)
        under_way = [request for lane in self.lanes for request in [*lane.under_way]]
        waiting = [request for lane in self.lanes for request in [*lane.queue.waiting]]
        found = [request for request in [*under_way, *waiting, *self._list_arrived()] if request.session == session]
        for request in found[:1]:
            request.stop()
        return bool(found)

    def _list_arrived(self) -> list[Request]:
        """Requests that are to be added before the next step."""
        return []

    def _join(self, prefill: Prefill) -> list[Event]:
        """Give the answers of a prompt their batch slots; returns their ends, if none is generated."""
        request = prefill.request
        if ends := request.end_unanswered():
            return ends
        try:
            joined = [self._start_answer(prefill, number) for number in range(request.params.n)]
        except Exception as error:  # caused by its parameters; other requests are not affected
            return request.fail(*explain(error))
        self._batch.join(joined, prefill.state)
        return []

    def _start_answer(self, prefill: Prefill, number: int) -> RunningAnswer:
        """The running answer of a finished prefill."""
        request = prefill.request
        stops = self.list_stops(request.params)
        seen = 0 if request.session is None else request.cached_tokens
        seed = seed_of(request, number)
        matcher = request.matcher and request.matcher.copy()
        spec = SamplerSpec(request.params, seed, request.prompt, stops, matcher)
        sampler = self.executor.new_sampler(prefill.state, spec)
        # The retention of a token is that of its slot, which has read guesses besides.
        guesser = self._make_guesser(prefill.tokens) if self.guesses and not request.retention else None
        return RunningAnswer(request, number, prefill.tokens, seen, self.tokenizer, stops, sampler, guesser)

    def _make_guesser(self, tokens: Sequence[int]) -> Guesser:
        """What has been in the text costs nothing to guess, so the draft model guesses only where it finds nothing."""
        text = TextGuesser(tokens, self.guesses)
        return text if self.draft is None else FirstGuesser(text, self.draft.guesser(tokens, self.guesses))

    def list_stops(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end an answer."""
        own = frozenset[int]() if params.ignore_eos else self._own_stops
        return own | frozenset(params.stop_token_ids)

    def _keep(self, running: RunningAnswer, slot: int) -> Future[None] | None:
        """Keep the state of a slot whose answer has ended: in its session, or in the prefix cache.

        An answer that recalled rows is not a prefix of a later prompt, which is read without them, or in other blocks.
        Returns a future that is done when the session is saved, or None if the answer has no session.
        """
        request, read = running.request, running.read
        if request.session is not None:
            try:
                state = self.executor.take(slot, running.seen + len(read))
                turn, follows = (state, running.unread, running.last), (request.turns, request.created)
                return self.queue.sessions.put(request.session, *turn, follows, request.beginning, request.size)
            except (UsageError, OSError) as error:
                return make_done_future(error)
        if running.reads and self.queue.prefixes.keeps_ends and self.executor.facts.recall is None:
            how = request.owner, request.protect, request.size or 0
            self.queue.prefixes.put(read, self.executor.take(slot, len(read)), *how)
        return None
