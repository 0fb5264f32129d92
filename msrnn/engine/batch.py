"""The running batch: each answer has a batch slot, and each decode step adds a token to it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from msrnn.engine.executor import Executor, SampledTokens, StateHandle
from msrnn.engine.pending_saves import PendingSaves
from msrnn.engine.requests import Event, Logprobs
from msrnn.engine.running_answer import Added, RunningAnswer

# Keeps the state of an answer that has ended in this slot; returns a future of its session's write, if it has one.
Keep = Callable[[RunningAnswer, int], Future[None] | None]


class _Sampled(NamedTuple):
    answers: list[RunningAnswer]
    tokens: SampledTokens


class _Verified(NamedTuple):
    running: RunningAnswer
    guesses: int
    found: list[SampledTokens]


class Batch:
    """Answers by batch slot.

    On a GPU the tokens of a step are processed while the next step runs, so that the device never waits for the host.
    An answer that has ended has then read its last token as well, and the token that was sampled after it is dropped.
    An answer that is alone, and whose tokens are guessed, waits for the tokens of each step.
    """

    def __init__(self, executor: Executor, keep: Keep) -> None:
        self._executor, self._keep = executor, keep
        self.running: list[RunningAnswer] = []
        self.saving = PendingSaves()
        self.overlaps = executor.facts.overlaps
        self._launched: list[_Sampled] = []
        self._before: list[_Sampled] = []  # launched by the step before
        self._verified: _Verified | None = None

    def join(self, answers: list[RunningAnswer], state: StateHandle) -> None:
        """Put the answers to one prompt into slots, and sample their first tokens; `state` has read the prompt."""
        start = len(self.running)
        self.running += answers
        tokens = self._executor.put(start, state, [running.sampler for running in answers])
        self._launched.append(_Sampled(answers, tokens))

    def step(self) -> None:
        """A decode step: every answer reads its last token, and its next one is sampled."""
        if not self.running:
            return
        if self._guesses and not self._before and (guesses := self.running[0].guess()):
            found = self._executor.verify(self.running[0].sampler, guesses)
            self._verified = _Verified(self.running[0], len(guesses), found)
            return
        tokens = self._executor.step([running.sampler for running in self.running])
        for running in self.running:
            running.reads += 1
        self._launched.append(_Sampled([*self.running], tokens))

    def results(self) -> list[Event]:
        """Events of the last step; where steps overlap, of the step before it, while the next one runs."""
        ready, self._launched = self._launched, []
        if self.overlaps and not self._guesses:
            ready, self._before = self._before, ready
        else:
            ready, self._before = [*self._before, *ready], []
        events = self._add_verified()
        slots = {running: slot for slot, running in enumerate(self.running)}
        for answers, sampled in ready:
            tokens, logprobs = sampled.on_host()
            for i, (running, token) in enumerate(zip(answers, tokens, strict=True)):
                if running in slots:
                    events += self._add_token(slots, running, token, logprobs.get(i))
        return events

    @property
    def _guesses(self) -> bool:
        """Whether the only running answer is guessed."""
        return len(self.running) == 1 and self.running[0].guesser is not None

    def _add_verified(self) -> list[Event]:
        """Add the tokens of an answer that was guessed; its slot takes back what it has read besides them."""
        verified, self._verified = self._verified, None
        if verified is None or verified.running not in self.running:
            return []
        running, slots, parts = verified.running, {verified.running: 0}, list[Added]()
        for sampled in verified.found:
            (token,), logprobs = sampled.on_host()
            parts.append(_add(running, token, logprobs.get(0)))
            if parts[-1].finish_reason is not None:
                break
        running.reads += len(parts)
        self._executor.take_back(1 + verified.guesses - len(parts))
        if running.guesser is not None:
            running.guesser.learn(verified.guesses, len(verified.found) - 1)
        return [event for added in parts for event in self._tell(slots, running, added)]

    def _add_token(
        self, slots: dict[RunningAnswer, int], running: RunningAnswer, token: int, logprobs: Logprobs | None
    ) -> list[Event]:
        """Add a token to an answer, which may end it."""
        return self._tell(slots, running, _add(running, token, logprobs))

    def _tell(self, slots: dict[RunningAnswer, int], running: RunningAnswer, added: Added) -> list[Event]:
        """The event of a token; an answer that ends gives its slot back."""
        wanted = running.wants_retention(ends=added.finish_reason is not None)
        retention = self._executor.slot_retention(slots[running]) if wanted else None
        event = Event(running.request, running.number, *added, retention)
        if event.finish_reason is None:
            return [event]
        slot, last = slots.pop(running), self.running[-1]
        if last is not running:
            slots[last] = slot
        return self._finish(slot, event)

    def drop_cancelled(self) -> list[Event]:
        """End the answers of requests that their clients have cancelled or stopped."""
        events: list[Event] = []
        for slot in range(len(self.running) - 1, -1, -1):
            running = self.running[slot]
            request, reason = running.request, running.ended_by_client
            if reason is not None:
                wanted = reason == "stop" and running.wants_retention(ends=True)
                retention = self._executor.slot_retention(slot) if wanted else None
                events += self._finish(slot, Event(request, running.number, None, "", None, reason, retention))
        return events

    def _finish(self, slot: int, event: Event) -> list[Event]:
        """Free the slot of an answer with this last event: its state is kept, and the last slot takes its place.

        Returns the event, or nothing while the session is being written; `collect_saved` then returns it later.
        """
        running = self.running[slot]
        saved = self._keep(running, slot) if event.finish_reason in ("stop", "length") else None
        last = len(self.running) - 1
        if slot != last:
            self._executor.move(last, slot)
            self.running[slot] = self.running[last]
        self.running.pop()
        self._executor.free(last)
        if saved is None:
            return [running.finish(event)]
        self.saving.hold(saved, running, event)
        return []

    def collect_saved(self, busy: bool) -> list[Event]:
        """The last events of answers whose sessions are saved by now; waits a little if not `busy`."""
        return [running.finish(event) for running, event in self.saving.collect(busy or bool(self.running))]

    def clear(self) -> None:
        """Forget all answers that have slots, after a step that was interrupted."""
        self.running, self._launched, self._before, self._verified = [], [], [], None


def _add(running: RunningAnswer, token: int, logprobs: Logprobs | None) -> Added:
    try:
        return running.add(token, logprobs)
    except Exception as error:  # the tokenizer's, for example; other answers are not affected
        return running.fail(error)
