"""A conversation as one bounded state: each turn reads what is new, and no history is kept."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from msrnn.cli.beyond import Beyond
from msrnn.cli.options import Speech
from msrnn.cli.terminal import note
from msrnn.cli.text import as_utf8, encode
from msrnn.cli.voice import Voice
from msrnn.core.state import MultiState
from msrnn.hf import chat_template as turns
from msrnn.hf.rnn import MultiStateRNN


class Conversation:
    """`state` always covers whole turns: a turn works on a copy, which takes its place at the end."""

    def __init__(
        self,
        rnn: MultiStateRNN,
        tokenizer: PreTrainedTokenizerBase,
        state: MultiState,
        speech: Speech,
        system: str | None = None,
        beyond: Beyond | None = None,
    ) -> None:
        self.rnn, self.tokenizer, self.state, self.speech = rnn, tokenizer, state, speech
        self.system, self.beyond = as_utf8(system) if system else system, beyond
        self.closing = encode(tokenizer, turns.closing(tokenizer), opening=False)[0].tolist()

    def turn(self, message: str) -> None:
        """Answer a message. Ctrl-C ends the answer, and what was said so far counts."""
        ids = encode(self.tokenizer, self._render(as_utf8(message)), opening=False)
        self._go_beyond(ids.shape[1])
        voice = Voice(self.tokenizer)
        state = self.state.fork(1)
        try:
            self.rnn.generate(ids, state=state, streamer=voice, **self.speech.settings)
        except KeyboardInterrupt:
            voice.end()
            note("stopped; what was said so far stays in the conversation")
            state = self.state.fork(1)
            self._read([*ids[0].tolist(), *voice.ids], state)
        else:
            if cut := voice.cut_at(self.speech.max_new_tokens, self.rnn.model):
                note(cut)
        ended = self.closing[:1] == voice.ids[-1:]
        self._read(self.closing[1:] if ended else self.closing, state)
        self.state = state

    def _go_beyond(self, new: int) -> None:
        """Before the turn that may pass the model's length: a turn is read under the same positions from end to end."""
        if self.beyond:
            room = new + self.speech.max_new_tokens + len(self.closing)
            successor = self.beyond.successor(self.rnn, int(self.state.seen[0]) + room)
            if successor is not self.rnn:
                self.rnn, self.state = successor, successor.convert_state(self.state)

    def _render(self, message: str) -> str:
        if int(self.state.seen[0]):
            return turns.following(self.tokenizer, message)
        return turns.opening(self.tokenizer, message, self.system)

    def _read(self, ids: list[int], state: MultiState) -> None:
        if ids:
            self.rnn.read(torch.tensor([ids]), state, last_only=True)
