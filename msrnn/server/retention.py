"""The field `retention` of a stream: the text of every token at its position, and which tokens the state holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from msrnn.engine.detokenizer import Detokenizer
from msrnn.engine.requests import Event
from msrnn.engine.retention import Retention
from msrnn.hf.messages import Messages, Render, locate_contents


class Span(NamedTuple):
    """The tokens of a message's text, without those that the chat template puts around it."""

    role: str
    start: int  # position in the conversation
    stop: int


class PromptTexts(NamedTuple):
    """The tokens that a request adds before its answer."""

    start: int  # position of the first one in the conversation
    pieces: list[str]  # the text that each one adds
    messages: list[Span] | None  # None: not known where the messages are

    @property
    def stop(self) -> int:
        """The position of the answer's first token."""
        return self.start + len(self.pieces)


def prompt_texts(
    tokenizer: Any, ids: Sequence[int], start: int, messages: Messages | None = None, render: Render | None = None
) -> PromptTexts:
    """The texts of tokens from position `start` on, the last of which were rendered from messages."""
    decoder = Detokenizer(tokenizer)
    pieces = [decoder.put(token) for token in ids]
    if messages is None or render is None:
        return PromptTexts(start, pieces, None)
    text, located = "".join(pieces), locate_contents(messages, render)
    if located is None or not text.endswith(rendered := located.text()):  # the template or the tokenizer changes texts
        return PromptTexts(start, pieces, None)
    offset, begins = len(text) - len(rendered), [0, *accumulate(map(len, pieces))]
    found = [
        Span(message["role"], *(start + at for at in _find_tokens(begins, first + offset, last + offset)))
        for message, (first, last) in zip(messages, located.spans, strict=True)
    ]
    return PromptTexts(start, pieces, found)


def _find_tokens(begins: list[int], first: int, last: int) -> tuple[int, int]:
    """The tokens with characters in [first, last); `begins` are where tokens begin, and the end of the last one.

    A token without text at `first` is a part of the character there, and one at `last` a part of the next.
    """
    start, stop = bisect_left(begins, first), bisect_left(begins, last)
    if first < last and begins[start] > first:
        start -= 1
    return start, stop


class RetentionField:
    """Builds the field for one answer, event by event."""

    def __init__(self, tokenizer: Any, prompt: PromptTexts) -> None:
        self._pieces, self._prompt, self._position = Detokenizer(tokenizer), prompt, prompt.stop
        self._begun = False
        self._last: Retention | None = None

    def build(self, event: Event) -> dict[str, Any]:
        """The texts of tokens that were not sent yet and, where the event has them, the tokens that the state holds."""
        new = [] if event.token is None else [self._pieces.put(event.token)]
        field: dict[str, Any] = {"start": self._position, "pieces": new}
        self._position += len(new)
        if not self._begun:
            self._begun, prompt = True, self._prompt
            messages = None if prompt.messages is None else [span._asdict() for span in prompt.messages]
            field = {
                "start": prompt.start,
                "pieces": [*prompt.pieces, *new],
                "messages": messages,
                "answer": prompt.stop,
            }
        if event.retention is not None:
            field |= describe_retention(event.retention, self._last)
            self._last = event.retention
        return field


def describe_retention(now: Retention, before: Retention | None = None) -> dict[str, Any]:
    """Describe the tokens that a state holds, as JSON; after an earlier one, `held` is the change."""
    numbers = {"seen": now.seen, "slots": now.slots, "used": now.used}
    held: dict[str, Any] = {"held": now.list_shares(before), "protected": [*map(list, now.protected)]}
    if now.recalled is not None:
        held["recalled"] = [*map(list, now.recalled)]
    return {**numbers, "bytes": now.nbytes, "full_bytes": now.full_nbytes, **held}
