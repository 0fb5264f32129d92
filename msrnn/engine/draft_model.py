"""Guesses of the next tokens of an answer by a draft model: a smaller one with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from msrnn.core.device_memory import on_device
from msrnn.core.state import MultiState
from msrnn.engine.guesses import Pace
from msrnn.errors import UsageError
from msrnn.hf.rnn import MultiStateRNN

PADDING = 1024  # ids that one of two models with the same tokenizer may have more than the other
WARM_UP = 4  # rounds, after which graphs are captured


class DraftModel:
    """Makes guessers for answers. The draft model belongs to the thread of the engine."""

    def __init__(self, rnn: MultiStateRNN, vocabulary: int) -> None:
        if not isinstance(rnn, MultiStateRNN):
            reason = f"is of type {type(rnn).__name__}, and must be a MultiStateRNN"
            raise UsageError(reason, name="draft", advice="wrap a smaller model: MultiStateRNN(model, policy, size)")
        if rnn.spec.recall is not None or rnn.spec.model.shards is not None:
            reason = "recalls rows, or is shared by processes"
            raise UsageError(reason, name="draft", advice="use a draft model without recall, in one process")
        embeddings: Any = rnn.model.get_input_embeddings()
        if abs(embeddings.num_embeddings - vocabulary) > PADDING:
            reason = f"has {embeddings.num_embeddings:,} tokens, and the model {vocabulary:,}"
            raise UsageError(reason, name="draft", advice="use a model with the same tokenizer")
        self.rnn, self.shared = rnn, min(vocabulary, embeddings.num_embeddings)

    def guesser(self, tokens: Sequence[int], most: int) -> DraftGuesser:
        return DraftGuesser(self, tokens, most)

    def warm_up(self, most: int) -> None:
        """Compile and capture what guesses need."""
        guesser = self.guesser([0], most)
        for _ in range(WARM_UP):
            guesser.learn(most, most)
            guesser.guess(most)
            for _ in range(most):
                guesser.add(0)


class DraftGuesser:
    """Guesses the draft model's most likely tokens.

    Its state reads tokens of the text only; guesses are read by a copy. It begins when it is first asked, so that
    answers which are never alone cost nothing. A text that the draft model cannot read is not guessed: one with tokens
    that it does not have, or of more positions.
    """

    def __init__(self, model: DraftModel, tokens: Sequence[int], most: int) -> None:
        self._model, self._unread, self._pace = model, [*tokens], Pace(most)
        self._state: MultiState | None = None

    def add(self, token: int) -> None:
        self._unread.append(token)
        self._pace.add()

    @torch.no_grad()
    def guess(self, most: int) -> list[int]:
        rnn, shared, count = self._model.rnn, self._model.shared, min(self._pace.count, most)
        if self._state is None:
            self._state = rnn.state()
        if self._pace.pauses or not self._unread or not self._can_read(count):
            return []
        logits = rnn.read(on_device(self._unread, rnn.device)[None], self._state, last_only=True)
        self._unread.clear()
        tokens, copy = [logits[:, -1, :shared].argmax(-1, keepdim=True)], self._state.fork(1)
        while len(tokens) < count:
            tokens.append(rnn.step(tokens[-1], copy)[:, -1, :shared].argmax(-1, keepdim=True))
        guesses: list[int] = torch.cat(tokens, 1)[0].tolist()
        return guesses

    def _can_read(self, guesses: int) -> bool:
        assert self._state is not None
        last, coming = self._model.rnn.spec.model.last_position, len(self._unread) + guesses
        fits = last is None or self._state.columns + coming <= last + 1
        return fits and max(self._unread) < self._model.shared

    def learn(self, guessed: int, right: int) -> None:
        self._pace.learn(guessed, right)
