"""Guesses of the next tokens of an answer by a draft model: a smaller one with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from msrnn.core.device_memory import on_device
from msrnn.core.notes import note
from msrnn.core.state import MultiState
from msrnn.engine.guesses import Pace
from msrnn.errors import UsageError
from msrnn.hf.rnn import MultiStateRNN

PADDING = 1024  # ids that one of two models with the same tokenizer may have more than the other
WARM_UP = 4  # reads, after which a graph is captured


class DraftModel:
    """Makes guessers for answers. The draft model belongs to the thread of the engine.

    prompt_tokens  that it reads at once, so that nobody waits for the end of a long prompt
    """

    def __init__(self, rnn: MultiStateRNN, vocabulary: int, prompt_tokens: int) -> None:
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
        self.rnn, self.shared, self.prompt_tokens = rnn, min(vocabulary, embeddings.num_embeddings), prompt_tokens
        self._failed = False

    def guesser(self, tokens: Sequence[int], most: int) -> DraftGuesser:
        return DraftGuesser(self, tokens, most)

    def warm_up(self, most: int) -> None:
        """Compile and capture what prompts and guesses need."""
        longest = self.prompt_tokens if self.rnn.captures else 1
        with self.rnn.compiling_rests():
            for width in [1 << power for power in range(longest.bit_length())]:
                for _ in range(WARM_UP):
                    guesser = self.guesser([0] * width, most)
                    guesser.learn(most, most)
                    guesser.guess(most)

    def note_failure(self, error: Exception) -> None:
        """Remark on the first failure: answers are generated without its guesses."""
        if not self._failed:
            note(f"the draft model failed, and answers go on without its guesses ({type(error).__name__}: {error})")
        self._failed = True


class DraftGuesser:
    """Guesses the draft model's most likely tokens.

    Its state reads tokens of the text only; guesses are read by a copy. It begins when it is first asked, so that
    answers which are never alone cost nothing. It guesses nothing for a text with tokens outside its vocabulary or
    beyond its last position, nor after a failure, such as memory that is full.
    """

    def __init__(self, model: DraftModel, tokens: Sequence[int], most: int) -> None:
        self._model, self._unread, self._pace = model, [*tokens], Pace(most)
        self._state: MultiState | None = None
        self._gave_up = bool(tokens) and max(tokens) >= model.shared

    def add(self, token: int) -> None:
        self._unread.append(token)
        self._pace.add()
        self._gave_up |= token >= self._model.shared

    def guess(self, most: int) -> list[int]:
        if self._gave_up or self._pace.pauses or not self._unread:
            return []
        try:
            return self._guess(min(self._pace.count, most))
        except (RuntimeError, UsageError) as error:
            self._gave_up, self._state = True, None
            self._model.note_failure(error)
            return []

    @torch.no_grad()
    def _guess(self, count: int) -> list[int]:
        rnn, shared, at_once = self._model.rnn, self._model.shared, self._model.prompt_tokens
        if self._state is None:
            self._state = rnn.state()
        last = rnn.spec.model.last_position
        if last is not None and self._state.columns + len(self._unread) + count > last + 1:
            self._gave_up = True
            return []
        coming, self._unread = self._unread[:at_once], self._unread[at_once:]
        logits = rnn.read(on_device(coming, rnn.device)[None], self._state, last_only=True)
        if self._unread:
            return []  # it goes on at the next step
        tokens, copy = [logits[:, -1, :shared].argmax(-1, keepdim=True)], self._state.fork(1)
        while len(tokens) < count:
            tokens.append(rnn.step(tokens[-1], copy)[:, -1, :shared].argmax(-1, keepdim=True))
        guesses: list[int] = torch.cat(tokens, 1)[0].tolist()
        return guesses

    def learn(self, guessed: int, right: int) -> None:
        self._pace.learn(guessed, right)
