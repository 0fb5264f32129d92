"""Chat templates and conversations, one turn at a time.

A conversation is one bounded state, which holds the earlier turns. Only the new turn is rendered and read, and no
history is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.extension import training_length
from msrnn.hf.messages import Messages, encode_messages
from msrnn.hf.rnn import MultiStateRNN

_ANSWER = "(an earlier answer)"
_EARLIER = [{"role": "user", "content": "(an earlier question)"}, {"role": "assistant", "content": _ANSWER}]


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise UsageError("this model has no chat template: use an instruct model")


def opening(tokenizer: PreTrainedTokenizerBase, message: str, system: str | None = None) -> str:
    """The first turn of a conversation, up to where the answer begins."""
    return render(tokenizer, first_messages(message, system), prompt=True)


def first_messages(message: str, system: str | None = None) -> Messages:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": message}]


def encode_first(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """The tokens of a conversation up to where the answer begins. Contents are text, without special tokens."""
    return encode_messages(tokenizer, messages, lambda some: render(tokenizer, some, prompt=True))


def encode_following(tokenizer: PreTrainedTokenizerBase, message: str) -> list[int]:
    """The tokens of a later turn, as `following` writes it. The message is text, without special tokens."""
    later = [{"role": "user", "content": message}]
    return encode_messages(tokenizer, later, lambda some: following(tokenizer, some[0]["content"]))


def closing(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text after every answer, from its stop token on."""
    return _after_answer(render(tokenizer, _EARLIER, prompt=False))


def following(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """A later turn, up to where the answer begins: what it adds after the `closing` of the turn before."""
    both = render(tokenizer, [*_EARLIER, {"role": "user", "content": message}], prompt=True)
    return _after_answer(both).removeprefix(closing(tokenizer))


def _after_answer(text: str) -> str:
    _, answer, after = text.partition(_ANSWER)
    if not answer:
        raise UsageError(
            "this model's chat template changes earlier answers, so turns cannot be rendered singly: use another model"
        )
    return after


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, prompt: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # a template is a program, whose errors have no common kind
        raise UsageError(f"this model's chat template refuses the conversation: {error}") from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> Tensor:
    """Token ids [1, T]. Special tokens belong at the start of a text, not where a text is continued."""
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    return ids.long()


class AnswerStreamer:
    """A streamer for `generate`: prints the new tokens as text, and records their ids and the time they took."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids: list[int] = []
        self._first_time = self._last_time = 0.0
        self._printer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: Tensor) -> None:
        if not self._printer.next_tokens_are_prompt:
            self._last_time = perf_counter()
            self._first_time = self._first_time if self.ids else self._last_time
            self.ids += value.flatten().tolist()
        self._printer.put(value)

    def end(self) -> None:
        self._printer.end()

    @property
    def tokens_per_second(self) -> float | None:
        """The decoding speed after the first token; None for fewer than two tokens."""
        if len(self.ids) < 2:
            return None
        return (len(self.ids) - 1) / max(self._last_time - self._first_time, 1e-9)

    def is_cut(self, max_new_tokens: int, model: PreTrainedModel) -> bool:
        """Whether the answer reached its token limit before a stop token."""
        config: Any = model.generation_config
        stop_tokens = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        return len(self.ids) >= max_new_tokens and self.ids[-1] not in stop_tokens


def state_after_interruption(
    rnn: MultiStateRNN, state: MultiState, before: MultiState, prompt: Tensor, answer: list[int]
) -> MultiState:
    """The state after a prompt [1, T] and a partial answer, when `generate` was interrupted.

    If the interruption fell between two forward passes, `state` reads the rest. Otherwise it is unusable, and `before`,
    a copy from before the call, reads the prompt and the answer again.
    """
    ids = [*prompt[0].tolist(), *answer]
    read = int(state.seen[0] - before.seen[0]) if state.whole else 0
    if not state.whole or read < prompt.shape[1]:
        state, read = before, 0
    if ids[read:]:
        rnn.read(torch.tensor([ids[read:]]), state, last_only=True)
    return state


class Turn(NamedTuple):
    """What happened in one turn."""

    interrupted: bool
    cut: bool  # at max_new_tokens


class Conversation:
    """A chat in one bounded state.

    `state` always ends with a complete turn: a turn works on a copy, which replaces `state` at the turn's end.

    settings  arguments of `generate`; must contain max_new_tokens
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
    ) -> None:
        self.rnn, self.tokenizer, self.state, self.settings = rnn, tokenizer, state, settings
        self.system, self.extend = system, extend
        self.closing: list[int] = encode(tokenizer, closing(tokenizer), False)[0].tolist()

    def turn(self, message: str) -> Turn:
        """Print the answer to a message. KeyboardInterrupt ends the answer, and what was generated so far counts."""
        ids = torch.tensor([self.encoded(message)])
        self._extend_if_needed(ids.shape[1])
        streamer = AnswerStreamer(self.tokenizer)
        state = self.state.fork(1)
        interrupted = False
        try:
            self.rnn.generate(ids, state=state, streamer=streamer, **self.settings)
        except KeyboardInterrupt:
            interrupted = True
            streamer.end()
            state = state_after_interruption(self.rnn, state, self.state.fork(1), ids, streamer.ids)
        has_stop_token = self.closing[:1] == streamer.ids[-1:]
        self._read(self.closing[1:] if has_stop_token else self.closing, state)
        self.state = state
        cut = not interrupted and streamer.is_cut(self.settings["max_new_tokens"], self.rnn.model)
        return Turn(interrupted, cut)

    def encoded(self, message: str) -> list[int]:
        """The tokens of the message as the chat template writes it, up to where the answer begins."""
        if int(self.state.seen[0]):
            return encode_following(self.tokenizer, message)
        return encode_first(self.tokenizer, first_messages(message, self.system))

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
