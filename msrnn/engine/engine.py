"""The engine: one loop that owns the device. Prompts are read in blocks between decode steps, then join the batch."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from msrnn.engine.loop import Loop
from msrnn.engine.prefix_files import PrefixFiles
from msrnn.engine.prefix_states import PrefixStates
from msrnn.engine.prompts import Prompts, Reading
from msrnn.engine.requests import Event, Logprobs, Request, SamplingParams
from msrnn.engine.rows import Rows, fitting_rows
from msrnn.engine.running import Running
from msrnn.engine.sampling import choose
from msrnn.engine.saving import Saving
from msrnn.engine.sessions import Sessions, check_name
from msrnn.engine.writer import Writer, written
from msrnn.errors import UsageError
from msrnn.hf.generation import stop_tokens_of
from msrnn.hf.rnn import MultiStateRNN

ALONE = 16_384  # tokens of a prompt that are read at once while no answer is generated
KEPT_ROWS, KEPT_ON_HOST, KEPT_ON_DISK = 8, 2**30, 2**34  # for kept states by default: rows' worth on the device; bytes


class Engine:
    """Answers many requests at once, over `rows` rows of bounded states.

    rows               answers that are generated at once; by default as many as fit, 8 on a CPU
    tokenizer          for the text of answers and for stop strings; without it, answers are tokens only
    prompt_tokens      tokens of prompts that are read between two decode steps while answers are generated
    prefix_bytes       memory for kept states on the model's device; 0: none are kept there
    prefix_host_bytes  memory for kept states on the host, for those that no longer fit on the device
    prefix_folder      a folder for kept states that no longer fit on the host either; without it they are forgotten
    prefix_disk_bytes  bytes of the files in it
    sessions           a folder for the states of sessions, which then survive a restart; without it they are in memory

    `generate` answers a list of prompts. `stream` answers one and may be called many times at once: a thread then runs
    the loop, and nothing else may use the model. `add` and `step` are the loop itself, for one thread at a time.
    """

    def __init__(
        self,
        rnn: MultiStateRNN,
        rows: int | None = None,
        *,
        tokenizer: Any = None,
        prompt_tokens: int = 512,
        prefix_bytes: int | None = None,
        prefix_host_bytes: int = KEPT_ON_HOST,
        prefix_folder: str | os.PathLike[str] | None = None,
        prefix_disk_bytes: int = KEPT_ON_DISK,
        sessions: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in (("rows", rows), ("prompt_tokens", prompt_tokens)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name}={value!r}: must be a whole number, 1 or more")
        self.rnn, self.tokenizer, self.prompt_tokens, self.writer = rnn, tokenizer, prompt_tokens, Writer()
        self.rows = Rows(rnn, rows or fitting_rows(rnn))
        kept = KEPT_ROWS * self.rows.nbytes // self.rows.capacity if prefix_bytes is None else prefix_bytes
        files: PrefixFiles | None = None
        if prefix_folder is not None:
            files = PrefixFiles(rnn.load_state, Path(prefix_folder), prefix_disk_bytes, self.writer)
        self.prefixes = PrefixStates(rnn.device, kept, prefix_host_bytes, files)
        self.sessions = Sessions(rnn.load_state, None if sessions is None else Path(sessions), writer=self.writer)
        self.prompts = Prompts(rnn, self.prefixes, self.sessions)
        self._own_stops = frozenset(stop_tokens_of(rnn.model, tokenizer))
        self._under_way: dict[Request, None] = {}  # taken from those that wait, and not finished
        self._reading: Reading | None = None
        self._running: list[Running] = []  # by row
        self._saving = Saving()
        self._loop: Loop | None = None

    def request(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None = None,
        session: str | None = None,
        turns: int | None = None,
    ) -> Request:
        """A request, checked; `add` queues it. A prompt is token ids, or text if there is a tokenizer.

        With the name of a `session`, the prompt is only what is new in that conversation, which is made if there is
        none. It changes when the answer is finished; a request that is cancelled or fails leaves it as it was. `turns`
        are the finished turns that the prompt follows, by default those that there are now; a request whose session has
        gone on in the meantime fails.
        """
        params = params or SamplingParams()
        vocabulary = self.prompts.vocabulary
        turns = self.sessions.turns(session) if session is not None and turns is None else turns or 0
        ids = self._encoded(prompt, begins=turns == 0) if isinstance(prompt, str) else [*prompt]
        if not ids:
            raise UsageError("the prompt is empty: give one token or more")
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
                raise UsageError(f"prompt with token {token!r}: this model has ids 0 to {vocabulary - 1}")
        if params.n > self.rows.capacity:
            raise UsageError(f"n={params.n}: the engine has {self.rows.capacity} rows; ask for fewer answers")
        if params.stop and self.tokenizer is None:
            raise UsageError(f"stop={list(params.stop)!r}: needs the text; give the engine a tokenizer")
        params.check_tokens(vocabulary)
        self.prompts.check_length(len(ids) + params.max_tokens)
        if session is not None:
            check_name(session)
            if params.n > 1:
                raise UsageError(f"n={params.n}: a session goes on with one answer; fork it, or ask for one")
        return Request(ids, params, session=session, turns=turns)

    def add(self, request: Request) -> None:
        self.prompts.waiting.append(request)

    @property
    def idle(self) -> bool:
        return not (self.prompts.waiting or self._reading or self._running or self._saving)

    @property
    def healthy(self) -> bool:
        """Whether streams can be answered: False after several steps in a row have failed."""
        return self._loop is None or self._loop.healthy

    @property
    def counts(self) -> dict[str, int]:
        """How many requests wait, whether one is being read, and how many rows are in use."""
        waiting, reading = len(self.prompts.waiting), int(self._reading is not None)
        return {"waiting": waiting, "reading": reading, "rows": len(self._running)}

    def _encoded(self, text: str, begins: bool) -> list[int]:
        """Special tokens belong at the beginning of a text, not where a session goes on."""
        if self.tokenizer is None:
            raise UsageError("a prompt of text needs a tokenizer: give the engine one, or give token ids")
        ids: list[int] = self.tokenizer(text, add_special_tokens=begins)["input_ids"]
        return ids

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Read some of the waiting prompts, and let every running answer have one more token."""
        try:
            events = self._drop_cancelled()
            events += self._read_prompts()
            if self._running:
                logits = self.rows.step(len(self._running))
                events += self._sample(logits, [*self._running])
            busy = bool(self._running or self._reading)
            return events + [self._end(*saved) for saved in self._saving.done(busy)]
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        """End everything that is under way: a step that was interrupted leaves states that cannot be used."""
        saving = self._saving.requests  # these have given their rows back
        for request in self._under_way.keys() - saving:
            request.fail("the engine was interrupted; ask again")
        self._reading, self._running, self._under_way = None, [], saving

    def _drop_cancelled(self) -> list[Event]:
        events: list[Event] = []
        for row in range(len(self._running) - 1, -1, -1):
            running = self._running[row]
            if running.request.cancelled:
                events += self._finish(row, Event(running.request, running.number, None, "", None, "cancelled"))
        waiting = [request for request in self.prompts.waiting if request.cancelled]
        if self._reading is not None and self._reading.request.cancelled:
            waiting.append(self._reading.request)
            del self._under_way[self._reading.request]
            self._reading = None
        for request in waiting:
            if request in self.prompts.waiting:
                self.prompts.waiting.remove(request)
            for number, answer in enumerate(request.answers):
                answer.finish_reason = "cancelled"
                events.append(Event(request, number, None, "", None, "cancelled"))
        return events

    def _read_prompts(self) -> list[Event]:
        """Read prompts, as many tokens as a step may: few while answers are generated, so that these go on."""
        events: list[Event] = []
        left = self.prompt_tokens
        while left > 0:
            try:
                reading = self._reading = self._reading or self._begin()
            except (UsageError, OSError) as error:  # its session cannot go on, which is not the others' fault
                request, _ = self._under_way.popitem()
                events += request.fail(str(error))
                continue
            if reading is None:
                break
            if not reading.finished:
                left -= self.prompts.read(reading, left if self._running else max(left, ALONE))
            if reading.finished:
                self._reading = None
                events += self._join(reading)
        return events

    def _begin(self) -> Reading | None:
        """The next waiting prompt, to be read, if there are rows for its answers."""
        free, waiting = self.rows.capacity - len(self._running), self.prompts.waiting
        if not waiting or waiting[0].params.n > free or (waiting[0].session and self.sessions.behind):
            return None
        request = waiting.popleft()
        request.begun = monotonic()
        self._under_way[request] = None
        if request.session is not None and self.uses_session(request.session, besides=request):
            raise UsageError(f"session {request.session!r}: is answering another request; wait for its end")
        return self.prompts.begin(request)

    def uses_session(self, name: str, besides: Request | None = None) -> bool:
        """Whether a request of the conversation with this name is under way."""
        return any(request.session == name for request in [*self._under_way] if request is not besides)

    def _join(self, reading: Reading) -> list[Event]:
        """Give the answers of a prompt their rows, and their first token."""
        request, logits = reading.request, reading.logits
        assert logits is not None
        joined = []
        for number in range(request.params.n):
            own = frozenset() if request.params.ignore_eos else self._own_stops
            seen = 0 if request.session is None else request.kept_tokens
            joined.append(Running(request, number, reading.tokens, seen, self.tokenizer, own, logits))
            self.rows.put(len(self._running), reading.state)
            self._running.append(joined[-1])
        return self._sample(logits.expand(len(joined), -1), joined, read=False)

    def _sample(self, logits: Tensor, rows: list[Running], read: bool = True) -> list[Event]:
        """The next tokens of rows, the last ones of the batch or all of it; `read`: they have read one just now."""
        start = len(self._running) - len(rows)
        if read:
            for running in rows:
                running.read.append(running.answer.tokens[-1])
        chosen = choose(logits, [running.sampler for running in rows])
        self.rows.next[start : start + len(rows), 0] = chosen.tokens.clamp(min=0)
        tokens, logprobs = chosen.tokens.tolist(), chosen.logprobs()
        events: list[Event] = []
        for i in range(len(rows) - 1, -1, -1):  # a row that ends is filled by the last one
            events += self._token(start + i, tokens[i], logprobs.get(i))
        return events[::-1]

    def _token(self, row: int, token: int, logprobs: Logprobs | None) -> list[Event]:
        """Add a token to the answer of a row, which may end it."""
        running = self._running[row]
        event = Event(running.request, running.number, *running.add(token, logprobs))
        return [event] if event.finish_reason is None else self._finish(row, event, unread=token)

    def _keep(self, row: int, unread: int | None) -> Future[None] | None:
        """Keep the state of a row whose answer has ended, for its session or for requests that begin alike.

        `unread` is the last token, which the row has not read. Returns when the session is saved, or why it is not.
        """
        running = self._running[row]
        request, read = running.request, [*running.tokens, *running.read]
        if request.session is not None:
            try:
                state = self.rows.take(row, running.seen + len(read))
                return self.sessions.put(request.session, state, [] if unread is None else [unread])
            except (UsageError, OSError) as error:
                return written(error)
        if running.read and self.prefixes.active:
            self.prefixes.put(read, self.rows.take(row, len(read)))
        return None

    def _finish(self, row: int, event: Event, unread: int | None = None) -> list[Event]:
        """Give back the row of an answer with this last event. Its state is kept, and the last row takes its place.

        Returns the event, or nothing while the session is being written; a later step then returns it.
        """
        running = self._running[row]
        saved = self._keep(row, unread) if event.finish_reason in ("stop", "length") else None
        last = len(self._running) - 1
        if row != last:
            self.rows.move(last, row)
            self._running[row] = self._running[last]
        self._running.pop()
        if saved is None:
            return [self._end(running, event)]
        self._saving.hold(saved, running, event)
        return []

    def _end(self, running: Running, event: Event) -> Event:
        """The last event of an answer, with the text that was held back."""
        assert event.finish_reason is not None
        rest = running.end(event.finish_reason)
        if running.request.finished:
            del self._under_way[running.request]
        return event._replace(text=event.text + rest)

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_tokens: Callable[[int], object] = lambda _: None,
    ) -> list[Request]:
        """Answer all prompts; returns their requests, with `answers`, in the same order.

        `on_tokens` counts the tokens of prompts and answers as they are done.
        """
        many = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else [*params]
        if len(many) != len(prompts):
            raise UsageError(f"{len(many)} params for {len(prompts)} prompts: give one for all, or one for each")
        requests = [self.request(prompt, some) for prompt, some in zip(prompts, many, strict=True)]
        if self._loop is not None:
            raise UsageError("this engine is streaming: use another one, or `stream`")
        for request in sorted(requests, key=lambda request: [*request.prompt]):  # so that prefixes are shared
            self.add(request)
        begun: set[int] = set()
        try:
            while not self.idle:
                events = self.step()
                for event in events:
                    if id(event.request) not in begun:
                        begun.add(id(event.request))
                        on_tokens(len(event.request.prompt))
                on_tokens(sum(event.token is not None for event in events))
        except BaseException:
            self.prompts.waiting.clear()
            raise
        return requests

    async def stream(
        self, prompt: Sequence[int] | str | Request, params: SamplingParams | None = None, session: str | None = None
    ) -> AsyncIterator[Event]:
        """The events of one request as they come. A consumer that stops early cancels the request."""
        request = prompt if isinstance(prompt, Request) else self.request(prompt, params, session)
        if self._loop is None:
            self._loop = Loop(self)
        events = self._loop.add(request)
        try:
            unfinished = request.params.n
            while unfinished:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                unfinished -= event.finish_reason is not None
        finally:
            request.cancel()

    def close(self) -> None:
        """Stop the thread that `stream` has started; what is under way is cancelled, and files are written."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        self.writer.close()
