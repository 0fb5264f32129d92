"""The chat program: a conversation is one bounded state, each turn reads only the new message, no history is kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from msrnn.cli.answer_streamer import AnswerStreamer
from msrnn.core.state import MultiState
from msrnn.hf.chat_template import (
    closing,
    count_system_tokens,
    encode,
    encode_first,
    encode_following,
    first_messages,
)
from msrnn.hf.extension import training_length
from msrnn.hf.rnn import MultiStateRNN


def recover_state(
    rnn: MultiStateRNN, state: MultiState, before: MultiState, prompt: Tensor, answer: list[int], protect: bool = False
) -> MultiState:
    """The state after a prompt [1, T] and a partial answer, when `generate` was interrupted.

    If the interruption fell between two forward passes, `state` reads the rest. Otherwise it is unusable, and `before`,
    a copy from before the call, reads the prompt, which it protects if the call did, and the answer again. Both recall
    as in the call.
    """
    read = int(state.seen[0] - before.seen[0]) - prompt.shape[1] if state.whole else -1
    if read < 0:
        state, read = before, 0
        with state.protecting(torch.tensor([prompt.shape[1]])) if protect else nullcontext():
            rnn.read_prompt(prompt, state, None)
    left = torch.tensor([answer[read:]])
    if rnn.spec.recall is not None:
        for token in left.split(1, 1):
            rnn.step(token, state)
    elif left.numel():
        rnn.read(left, state, last_only=True)
    return state


class Turn(NamedTuple):
    """The result of one turn."""

    interrupted: bool
    cut: bool  # at max_new_tokens


class Conversation:
    """A chat in one bounded state.

    `state` always ends with a complete turn: a turn works on a copy, which replaces `state` at the turn's end.

    settings  arguments of `generate`; must contain max_new_tokens
    protect   "system": the system message is never evicted; "prompt": a message is not, until the next turn; or "none"
    extend    called once, with the training length, before the first turn that may pass it; returns the model to
              continue with, which may be the same one
    """

    def __init__(
        self,
        rnn: MultiStateRNN,
        tokenizer: PreTrainedTokenizerBase,
        state: MultiState,
        settings: dict[str, Any],
        system: str | None = None,
        extend: Callable[[int], MultiStateRNN] | None = None,
        protect: str = "none",
    ) -> None:
        self.rnn, self.tokenizer, self.state, self.settings = rnn, tokenizer, state, settings
        self.system, self.extend, self.protect = system, extend, protect
        self.closing: list[int] = encode(tokenizer, closing(tokenizer), False)[0].tolist()

    def turn(self, message: str) -> Turn:
        """Print the answer to a message. KeyboardInterrupt ends the answer, and what was generated so far counts."""
        tokens = self.encode(message)
        self._extend_if_needed(len(tokens))
        streamer = AnswerStreamer(self.tokenizer)
        protect = "prompt" if self.protect == "prompt" else "none"
        interrupted, state = False, self.state
        try:
            state, ids = self._begin(tokens, message)
            self.rnn.generate(ids, state=state, streamer=streamer, protect=protect, **self.settings)
        except KeyboardInterrupt:
            interrupted = True
            streamer.end()
            before, ids = self._begin(tokens, message)
            state = recover_state(self.rnn, state, before, ids, streamer.ids, protect == "prompt")
        has_stop_token = self.closing[:1] == streamer.ids[-1:]
        self._read(self.closing[1:] if has_stop_token else self.closing, state)
        self.state = state
        cut = not interrupted and streamer.is_cut(self.settings["max_new_tokens"], self.rnn.model)
        return Turn(interrupted, cut)

    def encode(self, message: str) -> list[int]:
        """The tokens of the message as the chat template writes it, up to where the answer begins."""
        if int(self.state.seen[0]):
            return encode_following(self.tokenizer, message)
        return encode_first(self.tokenizer, first_messages(message, self.system))

    def _begin(self, tokens: list[int], message: str) -> tuple[MultiState, Tensor]:
        """A copy of the state that has read the system message, if that is to be protected, and the other tokens."""
        state, count = self.state.fork(1), 0
        if self.protect != "system":
            state.release()
        elif not int(state.seen[0]):
            messages = first_messages(message, self.system)
            count = count_system_tokens(messages, tokens, lambda other: encode_first(self.tokenizer, other))
        if count:
            self.rnn.read(torch.tensor([tokens[:count]]), state, last_only=True, protect=True)
        return state, torch.tensor([tokens[count:]])

    def _extend_if_needed(self, new_tokens: int) -> None:
        """Call `extend` before a turn that may pass the training length: all of a turn uses the same positions."""
        length = training_length(self.rnn.model)
        most = int(self.state.seen[0]) + new_tokens + self.settings["max_new_tokens"] + len(self.closing)
        if self.extend is None or length is None or most <= length:
            return
        extended = self.extend(length)
        self.extend = None
        if extended is not self.rnn:
            self.rnn, self.state = extended, extended.convert_state(self.state)

    def _read(self, ids: list[int], state: MultiState) -> None:
        if ids:
            self.rnn.read(torch.tensor([ids]), state, last_only=True)
