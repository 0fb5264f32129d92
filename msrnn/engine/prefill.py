"""The queue of waiting requests, and chunked prefill.

A prefill starts from a cached prefix, from the state of a session, or from an empty state. A few prefills may be under
way at once; their chunks alternate, so that a short prompt does not wait for the end of a long one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from msrnn.engine.executor import Executor, StateHandle
from msrnn.engine.prefix_cache import PrefixCache
from msrnn.engine.requests import Request
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import Sessions
from msrnn.errors import SessionError

WORTH_KEEPING = 32  # tokens that a cached prefix must save, more than a shorter one does
COMPARED = 64  # waiting requests that are looked through
MOST_PREFILLS = 4  # prefills under way at once: each has a state on the device
LONG = 1024  # tokens left of a prefill; shorter prompts may then overtake it
SCORED = 512  # tokens of a chunk whose log probabilities are wanted: its logits are in memory
FAIR = 4  # every fourth chunk is of the oldest prefill, so that short prompts cannot starve it


@dataclass(eq=False)
class Prefill:
    """A prompt whose prefill is under way."""

    request: Request
    tokens: Sequence[int]  # the prompt; in a session, after the tokens of the last turn that its state has not read
    state: StateHandle
    done: int  # tokens read
    stops: list[int]  # lengths after which the state is put into the prefix cache, in order; the last is the end
    protect: range = range(0)  # the tokens that are protected

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    @property
    def finished(self) -> bool:
        return self.left == 0

    def will_serve(self, request: Request) -> bool:
        """Whether it will put a prefix of the request's prompt into the prefix cache."""
        if request.session is not None or self.request.session is not None or request.owner != self.request.owner:
            return False
        coming = [stop for stop in self.stops if max(self.done, WORTH_KEEPING) <= stop <= len(request.prompt)]
        coming = [stop for stop in coming if min(request.protect, stop) == min(self.request.protect, stop)]
        return any(request.prompt[:stop] == self.tokens[:stop] for stop in coming)


class PrefillQueue:
    """Waiting requests in the order of their arrival, and prefills under way.

    Requests are prefilled one after another, except that a much shorter prompt may overtake a long one.
    """

    def __init__(self, executor: Executor, prefixes: PrefixCache, sessions: Sessions) -> None:
        self.executor, self.prefixes, self.sessions = executor, prefixes, sessions
        self.waiting: deque[Request] = deque()
        self.prefills: list[Prefill] = []  # in the order in which they began
        self._chunks = 0
        # Converts a session's state to this executor's; by default, a session of another executor is refused.
        self.convert: Callable[[StateHandle], StateHandle] = lambda state: state

    def drop_cancelled(self) -> list[Request]:
        """Remove cancelled and stopped requests that have no answer yet, and return them."""
        every = [*self.waiting, *(prefill.request for prefill in self.prefills)]
        dropped = [request for request in every if request.cancelled or request.stopped]
        if dropped:
            self.waiting = deque(request for request in self.waiting if request not in dropped)
            self.prefills = [prefill for prefill in self.prefills if prefill.request not in dropped]
        return dropped

    def take(self, free: int) -> Request | None:
        """Remove the next request to prefill from the queue, and return it; `free` batch slots are left for answers."""
        for request in islice(self.waiting, COMPARED):
            if request.session and self.sessions.behind:
                continue  # it waits for the disk; the requests after it need not
            if self._may_begin(request, free):
                self.waiting.remove(request)
                return request
            if not self.prefills:
                break  # in the order of their arrival
        return None

    def _may_begin(self, request: Request, free: int) -> bool:
        if request.params.n > free or not self.prefills:
            return request.params.n <= free
        shortest = min(prefill.left for prefill in self.prefills)
        if len(self.prefills) == MOST_PREFILLS or shortest < max(LONG, 2 * len(request.prompt)):
            return False
        if request.session and next(other for other in self.waiting if other.session == request.session) is not request:
            return False  # turns of a session stay in order
        return not any(prefill.will_serve(request) for prefill in self.prefills)

    def choose_next(self) -> Prefill | None:
        """The prefill of the next chunk: the one with the fewest tokens left, or at every fourth chunk the oldest."""
        if not self.prefills:
            return None
        if self._chunks % FAIR == FAIR - 1:
            return self.prefills[0]
        return min(self.prefills, key=lambda prefill: prefill.left)

    def begin(self, request: Request) -> None:
        """Begin the prefill of a request. Raises a UsageError or an OSError if its session cannot be continued."""
        session = request.session
        self.prefills.append(self._begin_prompt(request) if session is None else self._begin_turn(request, session))

    def _begin_prompt(self, request: Request) -> Prefill:
        """Begin with the longest cached prefix, or with an empty state."""
        others = [other.prompt for other in islice(self.waiting, COMPARED) if other.owner == request.owner]
        scores = request.params.prompt_logprobs is not None  # a cached prefix has the logits of its last token only
        cached = None if scores else self.prefixes.find_longest(request.prompt, request.owner, request.protect)
        done = cached.length if cached else 0
        state = self.executor.copy(cached.state, "device") if cached else self.executor.new_state()
        stops: list[int] = []
        shared_lengths = self.prefixes.find_shared_lengths(request.prompt, others, request.owner)
        for shared in shared_lengths:  # a shorter one serves more prompts
            if shared >= max([done, *stops]) + WORTH_KEEPING:
                stops.append(shared)
        request.cached_tokens = done
        stops.append(len(request.prompt))
        return Prefill(request, request.prompt, state, done, stops, range(request.protect))

    def _begin_turn(self, request: Request, session_id: SessionId) -> Prefill:
        """Begin with the state after the session's last turn, or with an empty one."""
        session = self.sessions.get(session_id)
        if (request.turns, request.created) != ((session.turns, session.created) if session else (0, None)):
            raise SessionError(
                "has changed since this prompt was made for it", session_id, advice="make the prompt again"
            )
        if session is None:
            state = self.executor.new_state()
            return Prefill(request, request.prompt, state, 0, [len(request.prompt)], range(request.protect))
        if any(token >= self.executor.facts.vocabulary for token in session.unread):
            raise SessionError("has a token that this model does not have", session_id, advice="delete the session")
        state = self.convert(session.state)
        if state.fingerprint != self.executor.facts.fingerprint:  # the session was replaced while the request waited
            raise SessionError(
                "has changed since this prompt was made for it", session_id, advice="make the prompt again"
            )
        request.cached_tokens = state.seen
        tokens = [*session.unread, *request.prompt]
        self.executor.check_length(request.cached_tokens + len(tokens) + request.params.max_tokens)
        state, unread = self.executor.copy(state, "device"), len(session.unread)
        if not request.keeps_protected:
            self.executor.release(state)
        self.executor.check_protect(request.protect, state)
        return Prefill(request, tokens, state, 0, [len(tokens)], range(unread, unread + request.protect))

    def read_chunk(self, prefill: Prefill, most: int) -> int:
        """Read up to `most` tokens, and not past the next stop; returns how many."""
        self._chunks += 1  # here, since the chosen prefill may have to wait for the next step
        stop = next(stop for stop in prefill.stops if stop > prefill.done)
        scores = prefill.request.params.prompt_logprobs
        most = most if scores is None else min(most, SCORED)
        edges = [edge for edge in (prefill.protect.start, prefill.protect.stop) if edge > prefill.done]
        tokens = prefill.tokens[prefill.done : min([stop, prefill.done + most, *edges])]
        protect = prefill.done in prefill.protect
        prefill.request.prompt_logprobs += self.executor.read(prefill.state, tokens, scores, protect)
        prefill.done += len(tokens)
        caches = self.prefixes.active if prefill.done < len(prefill.tokens) else self.prefixes.keeps_ends
        if prefill.done == stop and caches and prefill.request.session is None:
            state = self.executor.copy(prefill.state, "device")
            self.prefixes.put(prefill.tokens[:stop], state, prefill.request.owner, prefill.request.protect)
        return len(tokens)
