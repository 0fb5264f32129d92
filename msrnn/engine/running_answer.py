"""A running answer: one that is being generated in a batch slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msrnn.engine.detokenizer import TextStream
from msrnn.engine.executor import NO_TOKEN, Sampler
from msrnn.engine.guesses import Guesser
from msrnn.engine.noise import mix
from msrnn.engine.requests import Answer, Event, FinishReason, Logprobs, Request


class Added(NamedTuple):
    """The part of an answer that a token adds; a stop token adds the finish reason only."""

    token: int | None
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None


def seed_of(request: Request, number: int) -> int:
    """The seed of one of a request's answers."""
    return request.seed if number == 0 else mix(request.seed ^ mix(number))


class RunningAnswer:
    """An answer that has a batch slot.

    tokens   the tokens of its prefill
    seen     tokens that the state had read before these, in a session
    reads    tokens of the answer that its slot has read
    stops    tokens that end it
    sampler  chooses its tokens
    guesser  guesses them; None: nobody does
    """

    def __init__(
        self,
        request: Request,
        number: int,
        tokens: Sequence[int],
        seen: int,
        tokenizer: Any,
        stops: frozenset[int],
        sampler: Sampler,
        guesser: Guesser | None = None,
    ) -> None:
        self.request, self.number, self.tokens, self.seen, self.sampler = request, number, tokens, seen, sampler
        self.guesser = guesser
        self.reads = 0
        self._generated: list[int] = []  # the answer, and the stop token that ended it
        params = request.params
        before = request.prompt[len(request.prompt) - params.continued :]
        self._text = (
            None
            if tokenizer is None
            else TextStream(tokenizer, params.stop, before, params.min_tokens, params.shown_tokens)
        )
        self._stops = stops

    @property
    def answer(self) -> Answer:
        return self.request.answers[self.number]

    @property
    def length(self) -> int:
        """The number of all tokens that its state has read."""
        return self.seen + len(self.tokens) + self.reads

    @property
    def read(self) -> list[int]:
        """All tokens that the slot has read, without those that its state had read before, in a session."""
        return [*self.tokens, *self._generated[: self.reads]]

    @property
    def unread(self) -> list[int]:
        return self._generated[self.reads :]

    @property
    def last(self) -> int:
        """The last token, whether or not the slot has read it."""
        return [*self.tokens[-1:], *self._generated[-1:]][-1]

    @property
    def ended_by_client(self) -> FinishReason | None:
        """The finish reason after a stop or cancel of the client; a stop before the first token cancels."""
        request = self.request
        if request.stopped and not request.cancelled and self._generated:
            return "stop"
        return "cancelled" if request.cancelled or request.stopped else None

    def add(self, token: int, logprobs: Logprobs | None) -> Added:
        """Add a token; a negative one is a key of `NO_TOKEN`, and ends the answer with an error."""
        answer, params = self.answer, self.request.params
        if token < 0:
            answer.error = NO_TOKEN[token]
            return Added(None, "", None, "error")
        self._generated.append(token)
        if self.guesser is not None:
            self.guesser.add(token)
        if token in self._stops:
            answer.stop_reason = token if token in params.stop_token_ids else None
            answer.ending = None if logprobs is None else (token, logprobs)
            return Added(None, "", None, "stop")
        answer.tokens.append(token)
        text = self._text.put(token) if self._text else ""
        answer.text += text
        if logprobs is not None:
            answer.logprobs.append(logprobs)
        if self._text is not None and self._text.stopped is not None:
            answer.stop_reason = self._text.stopped
            return Added(token, text, logprobs, "stop")
        return Added(token, text, logprobs, "length" if len(answer.tokens) >= params.max_tokens else None)

    def guess(self) -> list[int]:
        """Guesses of the tokens after the last one, no more than the answer may have besides one that is certain."""
        most = self.request.params.max_tokens - len(self.answer.tokens) - 1
        return [] if self.guesser is None or most < 1 else self.guesser.guess(most)

    def fail(self, error: Exception) -> Added:
        """End the answer; the error's text is not shown, since it may hold a prompt."""
        self._text = None
        self.answer.error = f"internal error ({type(error).__name__})"
        return Added(None, "", None, "error")

    def wants_retention(self, ends: bool) -> bool:
        """Whether the event of the last token has the retention of the state."""
        every = self.request.retention
        return every > 0 and (ends or (len(self.answer.tokens) - 1) % every == 0)

    def finish(self, event: Event) -> Event:
        """Finish the answer with its last event -> the event, with the text that was held back."""
        rest = self._text.end() if self._text else ""
        self.answer.text += rest
        self.answer.finish_reason = event.finish_reason
        return event._replace(text=event.text + rest)
