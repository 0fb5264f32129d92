"""Prompts: those that wait, and how one is read, from where an earlier request or the session has left off."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from msrnn.core.device_memory import on_device
from msrnn.core.state import MultiState
from msrnn.engine.prefix_states import PrefixStates
from msrnn.engine.requests import Request
from msrnn.engine.sessions import Sessions
from msrnn.errors import UsageError
from msrnn.hf.cuda_graphs import WORTH_CAPTURING
from msrnn.hf.rnn import MultiStateRNN

WORTH_KEEPING = 32  # tokens that a kept state saves, beside those that a shorter one does
COMPARED = 64  # waiting prompts that a new one is compared with


@dataclass(eq=False)
class Reading:
    """A prompt that is being read."""

    request: Request
    tokens: Sequence[int]  # the prompt; in a session, what the state has not read of the turn before comes first
    state: MultiState
    done: int  # tokens
    stops: list[int]  # where the state is kept, in order; the last is the end
    logits: Tensor | None = None  # after the last token that was read

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    @property
    def finished(self) -> bool:
        return self.left == 0


class Prompts:
    """Requests that wait, in the order of their arrival."""

    def __init__(self, rnn: MultiStateRNN, prefixes: PrefixStates, sessions: Sessions) -> None:
        self.rnn, self.prefixes, self.sessions = rnn, prefixes, sessions
        self.waiting: deque[Request] = deque()
        embeddings: Any = rnn.model.get_input_embeddings()
        self.vocabulary: int = embeddings.num_embeddings

    def begin(self, request: Request) -> Reading:
        """Start to read a prompt. Raises a UsageError or an OSError if its session cannot go on."""
        if request.session is not None:
            return self._go_on(request, request.session)
        others = [other.prompt for other in islice(self.waiting, COMPARED)]
        kept = self.prefixes.longest(request.prompt)
        done = len(kept.tokens) if kept else 0
        state = kept.state.to(self.rnn.device) if kept else self.rnn.state()
        stops: list[int] = []
        for shared in self.prefixes.shared_lengths(request.prompt, others):  # a shorter one serves more prompts
            if shared >= max([done, *stops]) + WORTH_KEEPING:
                stops.append(shared)
        request.kept_tokens = done
        stops.append(len(request.prompt))
        return Reading(request, request.prompt, state, done, stops, kept.logits if kept else None)

    def _go_on(self, request: Request, name: str) -> Reading:
        """From the state after the session's last turn, or from an empty one."""
        session = self.sessions.get(name)
        if request.turns != (session.turns if session else 0):
            raise UsageError(f"session {name!r}: has changed since this prompt was made for it; make the prompt again")
        if session is None:
            return Reading(request, request.prompt, self.rnn.state(), 0, [len(request.prompt)])
        if any(token >= self.vocabulary for token in session.unread):
            raise UsageError(f"session {name!r}: has a token that this model does not have; delete the session")
        request.kept_tokens = int(session.state.seen[0])
        tokens = [*session.unread, *request.prompt]
        self.check_length(request.kept_tokens + len(tokens) + request.params.max_tokens)
        return Reading(request, tokens, session.state.to(self.rnn.device), 0, [len(tokens)])

    def check_length(self, tokens: int) -> None:
        """Refuse what is too long for learned positions, or for a function of gaps."""
        self.rnn.spec.check_gaps(tokens)
        if self.rnn.spec.model.last_position is not None:
            self.rnn.spec.check_position(tokens - 1)

    def warm_up(self, most: int) -> None:
        """Read texts of the lengths that have a graph, up to `most` tokens, as often as it takes to capture one."""
        widths = [1 << power for power in range(4, most.bit_length())] or [1]
        for width in widths if self.rnn._graphs.possible else widths[:1]:
            ids = torch.zeros(1, width, dtype=torch.long, device=self.rnn.device)
            for _ in range(WORTH_CAPTURING + 1):
                self.rnn.read(ids, self.rnn.state(), last_only=True)

    def read(self, reading: Reading, most: int) -> int:
        """Read up to `most` tokens, and not past the next stop; returns how many."""
        stop = next(stop for stop in reading.stops if stop > reading.done)
        tokens = reading.tokens[reading.done : min(stop, reading.done + most)]
        ids = on_device(tokens, self.rnn.device)[None]
        reading.logits = self.rnn.read(ids, reading.state, last_only=True)[0, -1]
        reading.done += len(tokens)
        keeps = self.prefixes.active if reading.done < len(reading.tokens) else self.prefixes.keeps_ends
        if reading.done == stop and keeps and reading.request.session is None:
            self.prefixes.put(reading.tokens[:stop], reading.state.to(self.rnn.device), reading.logits.clone())
        return len(tokens)
