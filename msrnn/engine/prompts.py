"""Prompts: those that wait, those that are read in turns, and from which state each one is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from msrnn.engine.executor import Executor, StateHandle
from msrnn.engine.prefix_states import PrefixStates
from msrnn.engine.requests import Request
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import Sessions
from msrnn.errors import SessionError

WORTH_KEEPING = 32  # tokens that a kept state saves, beside those that a shorter one does
COMPARED = 64  # waiting prompts that a new one is compared with
MOST_READINGS = 4  # prompts that are read in turns: each has a state on the device
LONG = 1024  # tokens that are left of a prompt, for shorter ones to come first
SCORED = 512  # tokens that are read at once where their log probabilities are wanted: their logits are held meanwhile
FAIR = 4  # the oldest prompt has every fourth turn, so that short prompts cannot starve it


@dataclass(eq=False)
class Reading:
    """A prompt that is being read."""

    request: Request
    tokens: Sequence[int]  # the prompt; in a session, what the state has not read of the turn before comes first
    state: StateHandle
    done: int  # tokens
    stops: list[int]  # where the state is kept, in order; the last is the end

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    @property
    def finished(self) -> bool:
        return self.left == 0

    def will_serve(self, request: Request) -> bool:
        """Whether it will leave a state that saves the request a part of its prompt."""
        if request.session is not None or self.request.session is not None or request.owner != self.request.owner:
            return False
        coming = [stop for stop in self.stops if max(self.done, WORTH_KEEPING) <= stop <= len(request.prompt)]
        return any(request.prompt[:stop] == self.tokens[:stop] for stop in coming)


class Prompts:
    """Requests that wait, in the order of their arrival, and the prompts that are being read.

    One prompt is read at a time, unless it is long: prompts that are much shorter then come first.
    """

    def __init__(self, executor: Executor, prefixes: PrefixStates, sessions: Sessions) -> None:
        self.executor, self.prefixes, self.sessions = executor, prefixes, sessions
        self.waiting: deque[Request] = deque()
        self.readings: list[Reading] = []  # the one that began first comes first
        self._turn = 0
        # Makes a state of this executor of a session's; without it, a session of another executor is refused.
        self.convert: Callable[[StateHandle], StateHandle] = lambda state: state

    def drop_cancelled(self) -> list[Request]:
        """The requests that nobody waits for any more, and that have no answer yet."""
        every = [*self.waiting, *(reading.request for reading in self.readings)]
        dropped = [request for request in every if request.cancelled or request.stopped]
        if dropped:
            self.waiting = deque(request for request in self.waiting if request not in dropped)
            self.readings = [reading for reading in self.readings if reading.request not in dropped]
        return dropped

    def take(self, free: int) -> Request | None:
        """Take the next request whose prompt may be read from those that wait; `free` rows are left for answers."""
        for request in islice(self.waiting, COMPARED):
            if request.session and self.sessions.behind:
                continue  # it waits for the disk, and nobody else need wait for that
            if self._may_begin(request, free):
                self.waiting.remove(request)
                return request
            if not self.readings:
                break  # in the order of their arrival
        return None

    def _may_begin(self, request: Request, free: int) -> bool:
        if request.params.n > free or not self.readings:
            return request.params.n <= free
        shortest = min(reading.left for reading in self.readings)
        if len(self.readings) == MOST_READINGS or shortest < max(LONG, 2 * len(request.prompt)):
            return False
        if request.session and next(other for other in self.waiting if other.session == request.session) is not request:
            return False  # turns of a conversation stay in order
        return not any(reading.will_serve(request) for reading in self.readings)

    def next_reading(self) -> Reading | None:
        """The prompt that is read next: the one with fewest tokens left, and at times the one that began first."""
        if not self.readings:
            return None
        if self._turn % FAIR == FAIR - 1:
            return self.readings[0]
        return min(self.readings, key=lambda reading: reading.left)

    def begin(self, request: Request) -> None:
        """Start to read a prompt. Raises a UsageError or an OSError if its session cannot go on."""
        session = request.session
        self.readings.append(self._from_prefix(request) if session is None else self._go_on(request, session))

    def _from_prefix(self, request: Request) -> Reading:
        """From the state of the longest prefix that is kept."""
        others = [other.prompt for other in islice(self.waiting, COMPARED) if other.owner == request.owner]
        scores = request.params.prompt_logprobs is not None  # a kept state has the logits of its last token only
        kept = None if scores else self.prefixes.longest(request.prompt, request.owner)
        done = kept.length if kept else 0
        state = self.executor.copy(kept.state, "device") if kept else self.executor.new_state()
        stops: list[int] = []
        shared_lengths = self.prefixes.shared_lengths(request.prompt, others, request.owner)
        for shared in shared_lengths:  # a shorter one serves more prompts
            if shared >= max([done, *stops]) + WORTH_KEEPING:
                stops.append(shared)
        request.kept_tokens = done
        stops.append(len(request.prompt))
        return Reading(request, request.prompt, state, done, stops)

    def _go_on(self, request: Request, session_id: SessionId) -> Reading:
        """From the state after the session's last turn, or from an empty one."""
        session = self.sessions.get(session_id)
        if (request.turns, request.created) != ((session.turns, session.created) if session else (0, None)):
            raise SessionError(
                "has changed since this prompt was made for it", session_id, advice="make the prompt again"
            )
        if session is None:
            return Reading(request, request.prompt, self.executor.new_state(), 0, [len(request.prompt)])
        if any(token >= self.executor.facts.vocabulary for token in session.unread):
            raise SessionError("has a token that this model does not have", session_id, advice="delete the session")
        state = self.convert(session.state)
        if state.fingerprint != self.executor.facts.fingerprint:  # another one took its place while the prompt waited
            raise SessionError(
                "has changed since this prompt was made for it", session_id, advice="make the prompt again"
            )
        request.kept_tokens = state.seen
        tokens = [*session.unread, *request.prompt]
        self.executor.check_length(request.kept_tokens + len(tokens) + request.params.max_tokens)
        return Reading(request, tokens, self.executor.copy(state, "device"), 0, [len(tokens)])

    def read(self, reading: Reading, most: int) -> int:
        """Read up to `most` tokens, and not past the next stop; returns how many."""
        self._turn += 1  # here, since a prompt that is due may have to wait for the next step
        stop = next(stop for stop in reading.stops if stop > reading.done)
        scores = reading.request.params.prompt_logprobs
        most = most if scores is None else min(most, SCORED)
        tokens = reading.tokens[reading.done : min(stop, reading.done + most)]
        reading.request.prompt_logprobs += self.executor.read(reading.state, tokens, scores)
        reading.done += len(tokens)
        keeps = self.prefixes.active if reading.done < len(reading.tokens) else self.prefixes.keeps_ends
        if reading.done == stop and keeps and reading.request.session is None:
            state = self.executor.copy(reading.state, "device")
            self.prefixes.put(reading.tokens[:stop], state, reading.request.owner)
        return len(tokens)
