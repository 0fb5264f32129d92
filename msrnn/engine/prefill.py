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
from msrnn.engine.prompt_groups import PromptGroups
from msrnn.engine.requests import Request
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import Sessions
from msrnn.errors import SessionError
from msrnn.recall import Recalling

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
    stops: list[int]  # lengths after which the state is put into the prefix cache, in order
    parts: list[tuple[int, Recalling | None]]  # where each part ends, and how its tokens recall; the last is the end
    protect: range = range(0)  # the tokens that are protected
    first: int = 0  # the position of the first token in its text

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    @property
    def finished(self) -> bool:
        return self.left == 0

    def end_of_chunk(self, most: int) -> tuple[int, Recalling | None]:
        """Where a chunk of about `most` tokens ends, and how its tokens recall.

        It does not pass a stop, the end of a part, or the first or last protected token. Tokens that recall together
        are read together, even if they are more.
        """
        part, recalling = next((end, how) for end, how in self.parts if end > self.done)
        edges = [*self.stops, *((self.protect.start, self.protect.stop) if self.protect else ())]
        last = min([part, *(edge for edge in edges if edge > self.done)])
        end = min(self.done + most, last)
        if recalling is None or not recalling.starts:
            return end, recalling
        at = self.first
        return recalling.end_of_block(at + self.done, at + end, at + last) - at, recalling

    def will_serve(self, request: Request, longest: int) -> bool:
        """Whether it will put a prefix of the request's prompt into the cache, of at most `longest` tokens."""
        mine = self.request
        if request.session or mine.session or (request.owner, request.size) != (mine.owner, mine.size):
            return False
        coming = [stop for stop in self.stops if self.done < stop and WORTH_KEEPING <= stop <= longest]
        coming = [stop for stop in coming if min(request.protect, stop) == min(mine.protect, stop)]
        return any(request.prompt[:stop] == self.tokens[:stop] for stop in coming)


class PrefillQueue:
    """Waiting requests in the order of their arrival, and prefills under way.

    Requests are prefilled one after another, except that a much shorter prompt may overtake a long one, and that short
    ones are read together where the executor can do so.
    """

    def __init__(self, executor: Executor, prefixes: PrefixCache, sessions: Sessions) -> None:
        self.executor, self.prefixes, self.sessions = executor, prefixes, sessions
        self.waiting: deque[Request] = deque()
        self.prefills: list[Prefill] = []  # in the order in which they began
        self.groups = PromptGroups(executor.facts)
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
        overtakes = len(self.prefills) < MOST_PREFILLS and shortest >= max(LONG, 2 * len(request.prompt))
        if not overtakes and not self.groups.admits(request, self.prefills):
            return False
        if request.session and next(other for other in self.waiting if other.session == request.session) is not request:
            return False  # turns of a session stay in order
        longest = self._longest_prefix(request.prompt)
        return not any(prefill.will_serve(request, longest) for prefill in self.prefills)

    def choose_next(self, may_wait: bool = False) -> list[Prefill]:
        """The prefill of the next chunk: the one with the fewest tokens left, or at every fourth chunk the oldest.

        With it, those that are read together with it; none where it waits for others, which it may do.
        """
        if not self.prefills:
            return []
        oldest = self._chunks % FAIR == FAIR - 1
        chosen = self.prefills[0] if oldest else min(self.prefills, key=lambda prefill: prefill.left)
        return self.groups.choose(chosen, self.prefills, may_wait)

    def begin(self, request: Request) -> None:
        """Begin the prefill of a request. Raises a UsageError or an OSError if its session cannot be continued."""
        session = request.session
        if not self.prefills:
            self.groups.begin()
        self.prefills.append(self._begin_prompt(request) if session is None else self._begin_turn(request, session))

    def _begin_prompt(self, request: Request) -> Prefill:
        """Begin with the longest cached prefix, or with an empty state."""
        prompt, longest = request.prompt, self._longest_prefix(request.prompt)
        scores = request.params.prompt_logprobs is not None  # a cached prefix has the logits of its last token only
        how = request.owner, request.protect, longest, request.size or 0
        cached = None if scores else self.prefixes.find_longest(prompt, *how)
        done = cached.length if cached else 0
        state = self.executor.copy(cached.state, "device") if cached else self.executor.new_state(request.size)
        request.cached_tokens = done
        stops = self._choose_stops(request, done, longest)
        return Prefill(request, prompt, state, done, stops, self._parts(len(prompt)), range(request.protect))

    def _longest_prefix(self, prompt: Sequence[int]) -> int:
        """The length of the longest prefix of a prompt that the prefix cache may have."""
        recall = self.executor.facts.recall
        return len(prompt) if recall is None else recall.find_shared_length(len(prompt), len(prompt))

    def _choose_stops(self, request: Request, done: int, longest: int) -> list[int]:
        """The lengths after which the state of a prompt is put into the prefix cache, for prompts that share them.

        Where rows are recalled, the longest such prefix stands for the whole prompt, which serves no other.
        """
        recall, owner, stops = self.executor.facts.recall, request.owner, list[int]()
        alike = [one for one in islice(self.waiting, COMPARED) if (one.owner, one.size) == (owner, request.size)]
        others = [other.prompt for other in alike]
        if recall is None:
            shared = self.prefixes.find_shared_lengths(request.prompt, others, owner)
        else:
            others = [other[: self._longest_prefix(other)] for other in others]
            found = self.prefixes.find_shared_lengths(request.prompt, others, owner)
            found += [longest] if self.prefixes.keeps_ends else []
            shared = [recall.find_shared_length(length, len(request.prompt)) for length in found]
        for length in shared:  # a shorter one serves more prompts
            if length >= max([done, *stops]) + WORTH_KEEPING:
                stops.append(length)
        return stops if recall is not None else [*stops, longest]

    def _parts(self, tokens: int) -> list[tuple[int, Recalling | None]]:
        recall = self.executor.facts.recall
        return [(tokens, None)] if recall is None else recall.parts(tokens)

    def _begin_turn(self, request: Request, session_id: SessionId) -> Prefill:
        """Begin with the state after the session's last turn, or with an empty one."""
        session = self.sessions.get(session_id)
        if (request.turns, request.created) != ((session.turns, session.created) if session else (0, None)):
            raise SessionError(
                "has changed since this prompt was made for it", session_id, advice="make the prompt again"
            )
        if session is None:
            state, parts = self.executor.new_state(request.size), self._parts(len(request.prompt))
            return Prefill(request, request.prompt, state, 0, [], parts, range(request.protect))
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
        parts, recall = (
            [(unread + end, how) for end, how in self._parts(len(request.prompt))],
            self.executor.facts.recall,
        )
        if unread and recall is not None:
            parts = [(unread, recall.answer), *parts]
        protect = range(unread, unread + request.protect)
        return Prefill(request, tokens, state, 0, [], parts, protect, first=request.cached_tokens)

    def read_chunk(self, prefill: Prefill, most: int) -> int:
        """Read about `most` tokens, and not past the next stop; returns how many."""
        self._chunks += 1  # here, since the chosen prefill may have to wait for the next step
        scores = prefill.request.params.prompt_logprobs
        end, recalling = prefill.end_of_chunk(most if scores is None else min(most, SCORED))
        tokens = prefill.tokens[prefill.done : end]
        protect = prefill.done in prefill.protect
        prefill.request.prompt_logprobs += self.executor.read(prefill.state, tokens, scores, protect, recalling)
        self._advance(prefill, end)
        return len(tokens)

    def read_together(self, prefills: Sequence[Prefill]) -> int:
        """Read what is left of several prefills at once; returns how many tokens."""
        self._chunks += 1
        parts = [prefill.tokens[prefill.done :] for prefill in prefills]
        self.executor.read_together([prefill.state for prefill in prefills], parts)
        for prefill in prefills:
            self._advance(prefill, len(prefill.tokens))
        return sum(map(len, parts))

    def _advance(self, prefill: Prefill, end: int) -> None:
        """Count the tokens before `end` as read, and put the state into the prefix cache where it serves others."""
        prefill.done = end
        caches = self.prefixes.active if end < len(prefill.tokens) else self.prefixes.keeps_ends
        if end in prefill.stops and caches:
            state, request = self.executor.copy(prefill.state, "device"), prefill.request
            self.prefixes.put(prefill.tokens[:end], state, request.owner, request.protect, request.size or 0)
