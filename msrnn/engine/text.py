"""The text of an answer, token by token: whole characters only, and nothing that a stop string may still take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for a character whose last bytes are missing


class TextStream:
    """Text of tokens as they come. `stopped` is the stop string that was found, if any; nothing follows it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._first, self._shown = 0, 0  # tokens that are decoded for context; tokens whose text is out
        self._held = ""  # decoded, but may be the beginning of a stop string
        self.stopped: str | None = None

    def put(self, token: int) -> str:
        """The text that is certain after this token."""
        self._ids.append(token)
        before, after = self._decoded(self._shown), self._decoded(len(self._ids))
        if after.endswith(UNFINISHED) or len(after) <= len(before):
            return ""
        self._first, self._shown = self._shown, len(self._ids)
        return self._released(after[len(before) :], last=False)

    def end(self) -> str:
        """The text that was held back; also that of a character which is not complete."""
        before, after = self._decoded(self._shown), self._decoded(len(self._ids))
        self._shown = len(self._ids)
        return "" if self.stopped else self._released(after[len(before) :], last=True)

    def _decoded(self, stop: int) -> str:
        """The text of the tokens from the first one of the context on: how a token reads depends on those before it."""
        text: str = self._tokenizer.decode(self._ids[self._first : stop], skip_special_tokens=True)
        return text

    def _released(self, text: str, last: bool) -> str:
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of a stop string, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
