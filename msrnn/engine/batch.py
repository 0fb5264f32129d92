"""The decode batch: the answers that have a row, and the steps that give each of them one more token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.engine.requests import Event, Logprobs
from msrnn.engine.retention import retention_of
from msrnn.engine.rows import Rows
from msrnn.engine.running import Running
from msrnn.engine.sampling import Chosen, choose
from msrnn.engine.saving import Saving

# Keeps the state of an answer that has ended, in this row; returns when its session is saved, if it has one.
Keep = Callable[[Running, int], Future[None] | None]


class _Sampled(NamedTuple):
    answers: list[Running]
    chosen: Chosen


class Batch:
    """Answers by row.

    On a GPU the tokens of a step are looked at while the next step runs, so that the device never waits for the host.
    An answer that has ended has then read its last token as well, and what was sampled after it is dropped.
    """

    def __init__(self, rows: Rows, keep: Keep) -> None:
        self.rows, self._keep = rows, keep
        self.running: list[Running] = []
        self.saving = Saving()
        self.overlaps = rows.next.is_cuda
        self._launched: list[_Sampled] = []
        self._before: list[_Sampled] = []  # launched by the step before

    def join(self, answers: list[Running], state: MultiState, logits: Tensor) -> None:
        """Give answers to one prompt their rows, and their first token; logits [V] after the prompt."""
        start = len(self.running)
        for i in range(len(answers)):
            self.rows.put(start + i, state)
        self.running += answers
        self._sample(logits.expand(len(answers), -1), answers, start)

    def step(self) -> None:
        """Let every answer read its last token, and sample the next one."""
        if not self.running:
            return
        logits = self.rows.step(len(self.running))
        for running in self.running:
            running.reads += 1
        self._sample(logits, [*self.running], 0)

    def _sample(self, logits: Tensor, answers: list[Running], start: int) -> None:
        chosen = choose(logits, [running.sampler for running in answers])
        self.rows.next[start : start + len(answers), 0] = chosen.tokens.clamp(min=0)
        self._launched.append(_Sampled(answers, chosen))

    def results(self) -> list[Event]:
        """What was sampled since the last call, or before that, where steps overlap."""
        ready, self._launched = self._launched, []
        if self.overlaps:
            ready, self._before = self._before, ready
        rows = {running: row for row, running in enumerate(self.running)}
        events: list[Event] = []
        for answers, chosen in ready:
            tokens, logprobs = chosen.on_host()
            for i, (running, token) in enumerate(zip(answers, tokens, strict=True)):
                if running in rows:
                    events += self._token(rows, running, token, logprobs.get(i))
        return events

    def _token(self, rows: dict[Running, int], running: Running, token: int, logprobs: Logprobs | None) -> list[Event]:
        """Add a token to an answer, which may end it."""
        try:
            added = running.add(token, logprobs)
        except Exception as error:  # the tokenizer's, for example: it is not the other answers' fault
            added = running.failed(error)
        told = running.tells_retention(ends=added.finish_reason is not None)
        held = retention_of(self.rows.state, rows[running]) if told else None
        event = Event(running.request, running.number, *added, held)
        if event.finish_reason is None:
            return [event]
        row, last = rows.pop(running), self.running[-1]
        if last is not running:
            rows[last] = row
        return self._finish(row, event)

    def drop_cancelled(self) -> list[Event]:
        """End answers that are no longer wanted, and those that are wanted as they are now."""
        events: list[Event] = []
        for row in range(len(self.running) - 1, -1, -1):
            running = self.running[row]
            request, reason = running.request, running.ended_by_client
            if reason is not None:
                told = reason == "stop" and running.tells_retention(ends=True)
                held = retention_of(self.rows.state, row) if told else None
                events += self._finish(row, Event(request, running.number, None, "", None, reason, held))
        return events

    def _finish(self, row: int, event: Event) -> list[Event]:
        """Give back the row of an answer with this last event: its state is kept, and the last row takes its place.

        Returns the event, or nothing while the session is being written; `saved` then returns it later.
        """
        running = self.running[row]
        saved = self._keep(running, row) if event.finish_reason in ("stop", "length") else None
        last = len(self.running) - 1
        if row != last:
            self.rows.move(last, row)
            self.running[row] = self.running[last]
        self.running.pop()
        if saved is None:
            return [running.ended(event)]
        self.saving.hold(saved, running, event)
        return []

    def saved(self, busy: bool) -> list[Event]:
        """The last events of answers whose sessions are saved by now; waits a little if not `busy`."""
        return [running.ended(event) for running, event in self.saving.done(busy or bool(self.running))]

    def clear(self) -> None:
        """Forget all answers that have rows, after a step that was interrupted."""
        self.running, self._launched, self._before = [], [], []
