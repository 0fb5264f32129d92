"""Offline generation: a list of prompts that is known from the start. Answers are returned as they finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from msrnn.engine.requests import Event, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.hf.rnn import MultiStateRNN

OnTokens = Callable[[int], object]


def full_model_rnn(model: PreTrainedModel, tokens: int) -> MultiStateRNN:
    """The full model on at most `tokens` tokens, in slots of a fixed size, which an engine needs.

    All slots are allocated, also for a shorter text.
    """
    from msrnn.hf.rnn import MultiStateRNN  # which loads torch

    return MultiStateRNN(model, "window", tokens)


class Steps(Protocol):
    """The part of an engine that `answer_all` calls."""

    @property
    def idle(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Event]: ...
    def drop_cancelled(self) -> list[Event]: ...


def answer_all(engine: Steps, requests: Sequence[Request], on_tokens: OnTokens) -> Iterator[tuple[int, Request]]:
    """Answer all requests -> the index of each, and itself, in the order in which they finish.

    If the iterator is closed early, or raises an error, unfinished requests are cancelled.
    """
    index = {request: number for number, request in enumerate(requests)}
    for request in sorted(requests, key=lambda request: [*request.prompt]):  # so that prefixes are shared
        engine.add(request)
    begun: set[Request] = set()
    try:
        while not engine.idle:
            events = [event for event in engine.step() if event.request in index]
            on_tokens(sum(len(request.prompt) for request in {event.request for event in events} - begun))
            on_tokens(sum(event.token is not None for event in events))
            begun |= {event.request for event in events}
            for request in dict.fromkeys(event.request for event in events if event.finish_reason):
                if request.finished:
                    yield index[request], request
    finally:
        for request in requests:
            if not request.finished:
                request.cancel()
        engine.drop_cancelled()
