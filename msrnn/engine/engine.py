"""The engine: one loop that owns the device. Prompts are read in blocks between decode steps, then join the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.engine.loop import Loop
from msrnn.engine.prefix_states import PrefixStates
from msrnn.engine.requests import Answer, Event, FinishReason, Logprobs, Request, SamplingParams
from msrnn.engine.rows import Rows, fitting_rows
from msrnn.engine.sampling import RowSampler, choose, mixed
from msrnn.engine.text import TextStream
from msrnn.errors import UsageError
from msrnn.hf.generation import stop_tokens_of
from msrnn.hf.rnn import MultiStateRNN

WORTH_KEEPING = 32  # tokens that two prompts share, from which on their state is kept
ALONE = 16_384  # tokens of a prompt that are read at once while no answer is generated
COMPARED = 64  # waiting prompts that a new one is compared with
KEPT_ROWS, KEPT_ON_HOST = 8, 2**30  # memory for kept states by default: rows' worth on the device; bytes on the host


@dataclass(eq=False)
class _Reading:
    """A prompt that is being read."""

    request: Request
    state: MultiState
    done: int  # tokens
    stops: list[int]  # where the state is kept, in order; the last is the prompt's end
    logits: Tensor | None = None


@dataclass(eq=False)
class _Running:
    """An answer that has a row."""

    request: Request
    index: int
    sampler: RowSampler
    text: TextStream | None
    stop_tokens: frozenset[int]
    read: list[int] = field(default_factory=list)  # the tokens of the answer that its row has read

    @property
    def answer(self) -> Answer:
        return self.request.answers[self.index]


class Engine:
    """Answers many requests at once, over `rows` rows of bounded states.

    rows               answers that are generated at once; by default as many as fit, 8 on a CPU
    tokenizer          for the text of answers and for stop strings; without it, answers are tokens only
    prompt_tokens      tokens of prompts that are read between two decode steps while answers are generated
    prefix_bytes       memory for kept states on the model's device; 0: none are kept there
    prefix_host_bytes  memory for kept states on the host, for those that no longer fit on the device

    `generate` answers a list of prompts. `stream` answers one and may be called many times at once: a thread then runs
    the loop. `add` and `step` are the loop itself, for one thread at a time.
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
    ) -> None:
        for name, value in (("rows", rows), ("prompt_tokens", prompt_tokens)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name}={value!r}: must be a whole number, 1 or more")
        self.rnn, self.tokenizer, self.prompt_tokens = rnn, tokenizer, prompt_tokens
        self.rows = Rows(rnn, rows or fitting_rows(rnn))
        one = self.rows.nbytes // self.rows.capacity
        kept = KEPT_ROWS * one if prefix_bytes is None else prefix_bytes
        self.prefixes = PrefixStates(rnn.device, kept, prefix_host_bytes)
        self._own_stops = frozenset(stop_tokens_of(rnn.model, tokenizer))
        embeddings: Any = rnn.model.get_input_embeddings()
        self._vocabulary: int = embeddings.num_embeddings
        self._waiting: deque[Request] = deque()
        self._under_way: dict[Request, None] = {}  # taken from those that wait, and not finished
        self._reading: _Reading | None = None
        self._running: list[_Running] = []  # by row
        self._loop: Loop | None = None

    def request(self, prompt: Sequence[int] | str, params: SamplingParams | None = None) -> Request:
        """A request, checked; `add` queues it. A prompt is token ids, or text if there is a tokenizer."""
        params = params or SamplingParams()
        ids = self._encoded(prompt) if isinstance(prompt, str) else [*prompt]
        if not ids:
            raise UsageError("the prompt is empty: give one token or more")
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocabulary:
                raise UsageError(f"prompt with token {token!r}: this model has ids 0 to {self._vocabulary - 1}")
        if params.n > self.rows.capacity:
            raise UsageError(f"n={params.n}: the engine has {self.rows.capacity} rows; ask for fewer answers")
        if params.stop and self.tokenizer is None:
            raise UsageError(f"stop={list(params.stop)!r}: needs the text; give the engine a tokenizer")
        params.check_tokens(self._vocabulary)
        self.rnn.spec.check_gaps(len(ids) + params.max_tokens)
        if self.rnn.spec.model.last_position is not None:
            self.rnn.spec.check_position(len(ids) + params.max_tokens - 1)
        return Request(ids, params)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._reading or self._running)

    @property
    def counts(self) -> dict[str, int]:
        """How many requests wait, whether one is being read, and how many rows are in use."""
        return {"waiting": len(self._waiting), "reading": int(self._reading is not None), "rows": len(self._running)}

    def _encoded(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise UsageError("a prompt of text needs a tokenizer: give the engine one, or give token ids")
        ids: list[int] = self.tokenizer(text)["input_ids"]
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
        except BaseException:
            self._fail()
            raise
        return events

    def _fail(self) -> None:
        """End everything that is under way: a step that was interrupted leaves states that cannot be used."""
        for request in self._under_way:
            for answer in request.answers:
                if answer.finish_reason is None:
                    answer.finish_reason, answer.error = "error", "the engine was interrupted; ask again"
        self._reading, self._running, self._under_way = None, [], {}

    def _drop_cancelled(self) -> list[Event]:
        events = []
        for row in range(len(self._running) - 1, -1, -1):
            if self._running[row].request.cancelled:
                events.append(self._finish(row, "cancelled"))
        waiting = [request for request in self._waiting if request.cancelled]
        if self._reading is not None and self._reading.request.cancelled:
            waiting.append(self._reading.request)
            del self._under_way[self._reading.request]
            self._reading = None
        for request in waiting:
            if request in self._waiting:
                self._waiting.remove(request)
            for index, answer in enumerate(request.answers):
                answer.finish_reason = "cancelled"
                events.append(Event(request, index, None, "", None, "cancelled"))
        return events

    def _read_prompts(self) -> list[Event]:
        """Read prompts, as many tokens as a step may: few while answers are generated, so that these go on."""
        events: list[Event] = []
        left = self.prompt_tokens
        while left > 0:
            reading = self._reading = self._reading or self._begin()
            if reading is None:
                break
            if reading.done < len(reading.request.prompt):
                left -= self._read(reading, left if self._running else max(left, ALONE))
            if reading.done == len(reading.request.prompt):
                self._reading = None
                events += self._join(reading)
        return events

    def _begin(self) -> _Reading | None:
        """The next waiting prompt, to be read, if there are rows for its answers."""
        free = self.rows.capacity - len(self._running)
        if not self._waiting or self._waiting[0].params.n > free:
            return None
        request = self._waiting.popleft()
        self._under_way[request] = None
        others = [other.prompt for other in islice(self._waiting, COMPARED)]
        shared = self.prefixes.common_prefix(request.prompt, others)
        kept = self.prefixes.longest(request.prompt)
        done = len(kept.tokens) if kept else 0
        state = kept.state.fork(1) if kept else self.rnn.state()
        logits = kept.logits if kept else None
        stops = [shared] if shared >= WORTH_KEEPING and shared > done else []
        request.kept_tokens = done
        return _Reading(request, state, done, [*stops, len(request.prompt)], logits)

    def _read(self, reading: _Reading, most: int) -> int:
        """Read up to `most` tokens, and not past the next stop; returns how many."""
        stop = next(stop for stop in reading.stops if stop > reading.done)
        tokens = reading.request.prompt[reading.done : min(stop, reading.done + most)]
        ids = torch.tensor([tokens], device=self.rnn.device)
        reading.logits = self.rnn.read(ids, reading.state, last_only=True)[0, -1]
        reading.done += len(tokens)
        if reading.done == stop and self.prefixes.active:
            prefix = reading.request.prompt[:stop]
            self.prefixes.put(prefix, reading.state.fork(1), reading.logits.clone())
        return len(tokens)

    def _join(self, reading: _Reading) -> list[Event]:
        """Give the answers of a prompt their rows, and their first token."""
        request, logits = reading.request, reading.logits
        assert logits is not None
        joined = []
        for index in range(request.params.n):
            seed = request.seed if index == 0 else mixed(request.seed ^ mixed(index))
            sampler = RowSampler(request.params, seed, request.prompt, logits.shape[-1], logits.device)
            text = None if self.tokenizer is None else TextStream(self.tokenizer, request.params.stop)
            own = frozenset() if request.params.ignore_eos else self._own_stops
            running = _Running(request, index, sampler, text, own | frozenset(request.params.stop_token_ids))
            self.rows.put(len(self._running), reading.state)
            self._running.append(running)
            joined.append(running)
        return self._sample(logits.expand(len(joined), -1), joined, read=False)

    def _sample(self, logits: Tensor, rows: list[_Running], read: bool = True) -> list[Event]:
        """The next tokens of rows, the last ones of the batch or all of it; `read`: they have read one just now."""
        start = len(self._running) - len(rows)
        if read:
            for running in rows:
                running.read.append(running.answer.tokens[-1])
        chosen = choose(logits, [running.sampler for running in rows])
        self.rows.next[start : start + len(rows), 0] = chosen.tokens.clamp(min=0)
        tokens, logprobs = chosen.tokens.tolist(), chosen.logprobs()
        events = []
        for i in range(len(rows) - 1, -1, -1):  # a row that ends is filled by the last one
            events.append(self._token(start + i, tokens[i], logprobs.get(i)))
        return events[::-1]

    def _token(self, row: int, token: int, logprobs: Logprobs | None) -> Event:
        """Add a token to the answer of a row, which may end it."""
        running = self._running[row]
        answer, params = running.answer, running.request.params
        if token < 0:
            answer.error = "the model computed numbers that are not finite"
            return self._finish(row, "error")
        if token in running.stop_tokens:
            answer.stop_reason = token if token in params.stop_token_ids else None
            return self._finish(row, "stop")
        answer.tokens.append(token)
        text = running.text.put(token) if running.text else ""
        answer.text += text
        if logprobs is not None:
            answer.logprobs.append(logprobs)
        reason: FinishReason | None = None
        if running.text is not None and running.text.stopped is not None:
            answer.stop_reason, reason = running.text.stopped, "stop"
        elif len(answer.tokens) >= params.max_tokens:
            reason = "length"
        if reason is None:
            return Event(running.request, running.index, token, text, logprobs, None)
        end = self._finish(row, reason)
        return end._replace(token=token, logprobs=logprobs, text=text + end.text)

    def _finish(self, row: int, reason: FinishReason) -> Event:
        """End the answer of a row: its state is kept, and the last row takes its place."""
        running = self._running[row]
        request, answer = running.request, running.answer
        if reason in ("stop", "length") and running.read and self.prefixes.active:
            tokens = [*request.prompt, *running.read]
            self.prefixes.put(tokens, self.rows.take(row, len(tokens)))
        last = len(self._running) - 1
        if row != last:
            self.rows.move(last, row)
            self._running[row] = self._running[last]
        self._running.pop()
        rest = running.text.end() if running.text else ""
        answer.text += rest
        answer.finish_reason = reason
        if request.finished:
            del self._under_way[request]
        return Event(request, running.index, None, rest, None, reason)

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
            self._waiting.clear()
            raise
        return requests

    async def stream(
        self, prompt: Sequence[int] | str | Request, params: SamplingParams | None = None
    ) -> AsyncIterator[Event]:
        """The events of one request as they come. A consumer that stops early cancels the request."""
        request = prompt if isinstance(prompt, Request) else self.request(prompt, params)
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
        """Stop the thread that `stream` has started; what is under way is cancelled."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None
