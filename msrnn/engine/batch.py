"""The running answers: each has a batch slot, and each step gives it one more token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from msrnn.engine.executor import Executor, SampledTokens, StateHandle
from msrnn.engine.requests import Event, Logprobs
from msrnn.engine.running import Running
from msrnn.engine.saving import Saving

# Keeps the state of an answer that has ended, in this slot; returns when its session is saved, if it has one.
Keep = Callable[[Running, int], Future[None] | None]


class _Sampled(NamedTuple):
    answers: list[Running]
    tokens: SampledTokens


class Batch:
    """Answers by batch slot.

    On a GPU the tokens of a step are looked at while the next step runs, so that the device never waits for the host.
    An answer that has ended has then read its last token as well, and what was sampled after it is dropped.
    """

    def __init__(self, executor: Executor, keep: Keep) -> None:
        self._executor, self._keep = executor, keep
        self.running: list[Running] = []
        self.saving = Saving()
        self.overlaps = executor.facts.overlaps
        self._launched: list[_Sampled] = []
        self._before: list[_Sampled] = []  # launched by the step before

    def join(self, answers: list[Running], state: StateHandle) -> None:
        """Give answers to one prompt their slots, and their first token; `state` has read the prompt."""
        start = len(self.running)
        self.running += answers
        tokens = self._executor.put(start, state, [running.sampler for running in answers])
        self._launched.append(_Sampled(answers, tokens))

    def step(self) -> None:
        """Let every answer read its last token, and sample the next one."""
        if not self.running:
            return
        tokens = self._executor.step([running.sampler for running in self.running])
        for running in self.running:
            running.reads += 1
        self._launched.append(_Sampled([*self.running], tokens))

    def results(self) -> list[Event]:
        """Events of the last step; where steps overlap, of the step before it, while the next one runs."""
        ready, self._launched = self._launched, []
        if self.overlaps:
            ready, self._before = self._before, ready
        slots = {running: slot for slot, running in enumerate(self.running)}
        events: list[Event] = []
        for answers, sampled in ready:
            tokens, logprobs = sampled.on_host()
            for i, (running, token) in enumerate(zip(answers, tokens, strict=True)):
                if running in slots:
                    events += self._token(slots, running, token, logprobs.get(i))
        return events

    def _token(self, slots: dict[Running, int], running: Running, token: int, logprobs: Logprobs | None) -> list[Event]:
        """Add a token to an answer, which may end it."""
        try:
            added = running.add(token, logprobs)
        except Exception as error:  # the tokenizer's, for example: it is not the other answers' fault
            added = running.failed(error)
        told = running.tells_retention(ends=added.finish_reason is not None)
        held = self._executor.slot_retention(slots[running]) if told else None
        event = Event(running.request, running.number, *added, held)
        if event.finish_reason is None:
            return [event]
        slot, last = slots.pop(running), self.running[-1]
        if last is not running:
            slots[last] = slot
        return self._finish(slot, event)

    def drop_cancelled(self) -> list[Event]:
        """End answers that are no longer wanted, and those that are wanted as they are now."""
        events: list[Event] = []
        for slot in range(len(self.running) - 1, -1, -1):
            running = self.running[slot]
            request, reason = running.request, running.ended_by_client
            if reason is not None:
                told = reason == "stop" and running.tells_retention(ends=True)
                held = self._executor.slot_retention(slot) if told else None
                events += self._finish(slot, Event(request, running.number, None, "", None, reason, held))
        return events

    def _finish(self, slot: int, event: Event) -> list[Event]:
        """Free the slot of an answer with this last event: its state is kept, and the last slot takes its place.

        Returns the event, or nothing while the session is being written; `saved` then returns it later.
        """
        running = self.running[slot]
        saved = self._keep(running, slot) if event.finish_reason in ("stop", "length") else None
        last = len(self.running) - 1
        if slot != last:
            self._executor.move(last, slot)
            self.running[slot] = self.running[last]
        self.running.pop()
        if saved is None:
            return [running.ended(event)]
        self.saving.hold(saved, running, event)
        return []

    def saved(self, busy: bool) -> list[Event]:
        """The last events of answers whose sessions are saved by now; waits a little if not `busy`."""
        return [running.ended(event) for running, event in self.saving.done(busy or bool(self.running))]

    def clear(self) -> None:
        """Forget all answers that have slots, after a step that was interrupted."""
        self.running, self._launched, self._before = [], [], []
