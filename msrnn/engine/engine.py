"""The engine: one loop that owns the device. Prompts are read in blocks between decode steps, then join the batch."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from tqdm import tqdm

from msrnn.core.state import MultiState
from msrnn.engine.batch import Batch
from msrnn.engine.loop import Loop
from msrnn.engine.offline import OnTokens, finished
from msrnn.engine.prefix_files import PrefixFiles
from msrnn.engine.prefix_states import PrefixStates
from msrnn.engine.prompts import Prompts, Reading
from msrnn.engine.requests import Event, Request, SamplingParams, explain
from msrnn.engine.rows import Rows, fitting_rows
from msrnn.engine.running import Running
from msrnn.engine.session_files import SessionId
from msrnn.engine.sessions import Sessions
from msrnn.engine.writer import Writer, written
from msrnn.errors import SessionError, UsageError
from msrnn.hf.generation import stop_tokens_of
from msrnn.hf.rnn import MultiStateRNN

ALONE = {"cpu": 2048, "cuda": 16_384}  # tokens of a prompt that are read at once while no answer is generated
OFFLINE = 16_384  # tokens of a list of prompts that are read at once
KEPT_ROWS, KEPT_ON_HOST, KEPT_ON_DISK = 8, 2**30, 2**34  # for kept states by default: rows' worth on the device; bytes
KEPT_OFFLINE = 4  # rows' worth for a list of prompts: a shared document, and what some of its prompts share more


class Engine:
    """Answers many requests at once, over `rows` rows of bounded states.

    rows               answers that are generated at once; by default as many as fit, 8 on a CPU
    tokenizer          for the text of answers and for stop strings; without it, answers are tokens only
    prompt_tokens      tokens of prompts that are read between two decode steps while answers are generated; by default
                       2,048 on a GPU, 512 elsewhere
    prefix_bytes       memory for kept states on the model's device; 0: none are kept there
    prefix_host_bytes  memory for kept states on the host, for those that no longer fit on the device
    keep_ends          keep states after whole prompts and answers too, for conversations that are sent again; without
                       it, only where prompts part
    prefix_folder      a folder for kept states that no longer fit on the host either; without it they are forgotten
    prefix_disk_bytes  bytes of the files in it
    sessions           a folder where sessions survive a restart, or another engine's, to share them; None: in memory
    session_bytes      bytes of all sessions, in memory or in the folder; the least recently used one is deleted first.
                       By default 1 GiB in memory and 64 GiB in a folder
    session_days       sessions without a turn for this many days are deleted; by default none
    owns_session       whether a session is this engine's, by its name, where several engines share the folder

    `generate` answers a list of prompts. `stream` answers one and may be called many times at once: a thread then runs
    the loop, and nothing else may use the model. `add` and `step` are the loop itself, for one thread at a time.
    """

    def __init__(
        self,
        rnn: MultiStateRNN,
        rows: int | None = None,
        *,
        tokenizer: Any = None,
        prompt_tokens: int | None = None,
        prefix_bytes: int | None = None,
        prefix_host_bytes: int = KEPT_ON_HOST,
        keep_ends: bool = True,
        prefix_folder: str | os.PathLike[str] | None = None,
        prefix_disk_bytes: int = KEPT_ON_DISK,
        sessions: str | os.PathLike[str] | Sessions | None = None,
        session_bytes: int | None = None,
        session_days: float | None = None,
        owns_session: Callable[[str], bool] = lambda _: True,
    ) -> None:
        for name, value in (("rows", rows), ("prompt_tokens", prompt_tokens)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name}={value!r}: must be a whole number, 1 or more")
        self.rnn, self.tokenizer = rnn, tokenizer
        self.writer = sessions.writer if isinstance(sessions, Sessions) else Writer()
        self.prompt_tokens = prompt_tokens or (2048 if rnn.device.type == "cuda" else 512)
        self.rows = self._make_rows(rows)
        kept = KEPT_ROWS * self.rows.nbytes // self.rows.capacity if prefix_bytes is None else prefix_bytes
        files: PrefixFiles | None = None
        if prefix_folder is not None:
            files = PrefixFiles(rnn.load_state, Path(prefix_folder), prefix_disk_bytes, self.writer)
        self.prefixes = PrefixStates(rnn.device, kept, prefix_host_bytes, files, keep_ends)
        if not isinstance(sessions, Sessions):
            folder = None if sessions is None else Path(sessions)
            limits: Any = {"most": session_bytes, "days": session_days}
            sessions = Sessions(self._load_session, folder, **limits, writer=self.writer, owns=owns_session)
        self.sessions = sessions
        self.prompts = Prompts(rnn, self.prefixes, self.sessions)
        self._own_stops = frozenset(stop_tokens_of(rnn.model, tokenizer))
        self._under_way: dict[Request, None] = {}  # taken from those that wait, and not finished
        self._alone = max(self.prompt_tokens, ALONE.get(rnn.device.type, ALONE["cpu"]))
        self._batch = Batch(self.rows, self._keep)
        self._loop: Loop | None = None
        self.lanes: list[Engine] = [self]  # engines that share one thread and the sessions, and take turns

    def _load_session(self, path: Path) -> MultiState:
        return self.rnn.load_state(path)

    def __repr__(self) -> str:
        return f"Engine({self.rnn!r}, rows={self.rows.capacity})"

    def _make_rows(self, rows: int | None) -> Rows:
        return Rows(self.rnn, rows or fitting_rows(self.rnn))

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile and capture what requests will need, so that the first ones do not wait for it."""
        if not self.idle:
            raise UsageError("this engine is answering requests: warm it up before")
        self.prompts.warm_up(self.prompt_tokens)
        self.rows.warm_up()

    @classmethod
    def offline(cls, rnn: MultiStateRNN, rows: int | None = None, tokenizer: Any = None) -> Engine:
        """An engine for lists of prompts: each is read at once, and only the states of shared prefixes are kept."""
        kept: Any = {"prefix_bytes": KEPT_OFFLINE * rnn.spec.nbytes(1), "prefix_host_bytes": 0, "keep_ends": False}
        return cls(rnn, rows, tokenizer=tokenizer, prompt_tokens=OFFLINE, **kept)

    def request(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None = None,
        session: str | None = None,
        turns: int | None = None,
        retention: int = 0,
        owner: str = "",
    ) -> Request:
        """A request, checked; `add` queues it. A prompt is token ids, or text if there is a tokenizer.

        With the name of a `session`, the prompt is only what is new in that conversation, which is made if there is
        none. It changes when the answer is finished; a request that is cancelled or fails leaves it as it was. `turns`
        are the finished turns that the prompt follows, by default those that there are now; a request whose session has
        gone on in the meantime fails. `retention`: after how many tokens events tell which tokens the state holds.
        Sessions and kept states belong to their `owner`, 16 hexadecimal digits, or to those who name none.
        """
        session_id = None if session is None else SessionId.of(SessionId(session, owner))
        params = params or SamplingParams()
        vocabulary = self.prompts.vocabulary
        turns = self.sessions.turns(session_id) if session_id is not None and turns is None else turns or 0
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
        if params.continued >= len(ids):
            raise UsageError(f"continued={params.continued}: must be less than the {len(ids)} tokens of the prompt")
        self.prompts.check_length(len(ids) + params.max_tokens)
        if session is not None:
            params.check_session()
        if not isinstance(retention, int) or isinstance(retention, bool) or retention < 0:
            raise UsageError(f"retention={retention!r}: must be a whole number of tokens, 0 or more")
        return Request(ids, params, session=session_id, turns=turns, retention=retention, owner=owner)

    def add(self, request: Request) -> None:
        self.prompts.waiting.append(request)

    @property
    def idle(self) -> bool:
        return not any(lane._has_work for lane in self.lanes)

    @property
    def _computes(self) -> bool:
        return bool(self.prompts.readings or self._batch.running)

    @property
    def _has_work(self) -> bool:
        return bool(self.prompts.waiting or self._computes or self._batch.saving)

    @property
    def capacity(self) -> int:
        """Answers that can be generated at once."""
        return sum(lane.rows.capacity for lane in self.lanes)

    @property
    def healthy(self) -> bool:
        """Whether streams can be answered: False after several steps in a row have failed."""
        return self._loop is None or self._loop.healthy

    @property
    def counts(self) -> dict[str, int]:
        """How many requests wait, how many are being read, and how many rows are in use."""
        waiting, reading = len(self.prompts.waiting), len(self.prompts.readings)
        return {"waiting": waiting, "reading": reading, "rows": len(self._batch.running)}

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
            self._batch.step()
            events += self._read_prompts()
            events += self._batch.results()
            events += self._batch.saved(busy=any(lane._computes for lane in self.lanes))
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
        if request in self._under_way:
            del self._under_way[request]
            if request.session is not None:
                self.sessions.end(request.session)

    def _fail(self) -> None:
        """End everything that is under way: a step that was interrupted leaves states that cannot be used."""
        saving = self._batch.saving.requests  # these have given their rows back
        for request in self._under_way.keys() - saving:
            request.fail("the engine was interrupted; ask again")
            self._forget(request)
        self._batch.clear()
        self.prompts.readings.clear()

    def _drop_cancelled(self) -> list[Event]:
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
        left, others = self.prompt_tokens, any(lane._has_work for lane in self.lanes if lane is not self)
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
        """Begin to read waiting prompts, if there are rows for their answers."""
        events: list[Event] = []
        while (request := self.prompts.take(self._free_rows)) is not None:
            request.begun = monotonic()
            try:
                if request.session is not None:
                    self._use_session(request.session)
                self._under_way[request] = None
                self.prompts.begin(request)
            except (UsageError, OSError) as error:  # its session cannot go on, which is not the others' fault
                events += request.fail(*explain(error))
                self._forget(request)
        return events

    @property
    def _free_rows(self) -> int:
        reserved = sum(reading.request.params.n for reading in self.prompts.readings)
        return self.rows.capacity - len(self._batch.running) - reserved

    def _use_session(self, session: SessionId) -> None:
        if self.uses_session(session):
            raise SessionError(f"{session!r}: is answering another request; wait for its end")
        self.sessions.begin(session, self.rows.nbytes // self.rows.capacity)

    def uses_session(self, session: str | SessionId) -> bool:
        """Whether a request of this conversation is under way."""
        under_way = (request for lane in self.lanes for request in [*lane._under_way])
        return any(request.session == SessionId.of(session) for request in under_way)

    def stop_session(self, session: str | SessionId) -> bool:
        """End the answer of a conversation as it is, so that the turn is kept; returns whether there is one."""
        session = SessionId.of(session)
        requests = (request for lane in self.lanes for request in [*lane._under_way, *lane.prompts.waiting])
        found = [request for request in requests if request.session == session]
        for request in found[:1]:
            request.stop()
        return bool(found)

    def _join(self, reading: Reading) -> list[Event]:
        """Give the answers of a prompt their rows; returns their ends, if none is generated."""
        request, logits = reading.request, reading.logits
        assert logits is not None
        if ends := request.ends_unanswered():
            return ends
        own = frozenset() if request.params.ignore_eos else self._own_stops
        seen = 0 if request.session is None else request.kept_tokens
        answers = range(request.params.n)
        try:
            joined = [Running(request, i, reading.tokens, seen, self.tokenizer, own, logits) for i in answers]
        except Exception as error:  # its parameters', which is not the others' fault
            return request.fail(*explain(error))
        self._batch.join(joined, reading.state, logits)
        return []

    def _keep(self, running: Running, row: int) -> Future[None] | None:
        """Keep the state of a row whose answer has ended, for its session or for requests that begin alike.

        Returns when the session is saved, or why it is not.
        """
        request, read = running.request, running.read
        if request.session is not None:
            try:
                state = self.rows.take(row, running.seen + len(read))
                return self.sessions.put(request.session, state, running.unread, running.last, request.turns)
            except (UsageError, OSError) as error:
                return written(error)
        if running.reads and self.prefixes.keeps_ends:
            self.prefixes.put(read, self.rows.take(row, len(read)), owner=request.owner)
        return None

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_tokens: OnTokens = lambda _: None,
        progress: bool = True,
    ) -> list[Request]:
        """Answer all prompts; returns their requests, with `answers`, in the same order.

        `on_tokens` counts the tokens of prompts and answers as they are done. `progress` shows a bar on a terminal.
        """
        found: dict[int, Request] = {}
        with tqdm(total=len(prompts), unit="prompt", disable=None if progress else True) as bar:
            for index, request in self.answers(prompts, params, on_tokens):
                found[index] = request
                bar.update()
        return [found[index] for index in range(len(prompts))]

    def answers(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_tokens: OnTokens = lambda _: None,
    ) -> Iterator[tuple[int, Request]]:
        """As `generate`, but each request is handed over as soon as it is finished, with the index of its prompt."""
        many = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else [*params]
        if len(many) != len(prompts):
            raise UsageError(f"{len(many)} params for {len(prompts)} prompts: give one for all, or one for each")
        requests = [self.request(prompt, some) for prompt, some in zip(prompts, many, strict=True)]
        if self._loop is not None:
            raise UsageError("this engine is streaming: use another one, or `stream`")
        return finished(self, requests, on_tokens)

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
