"""The text of an answer, token by token: whole characters only, and nothing that a stop string may still take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for a character whose last bytes are missing


class Pieces:
    """The text that each token adds. A character of several tokens is added by the last of them.

    skip_special     special tokens add nothing; otherwise their names
    most_unfinished  tokens that wait for the rest of a character; more are not one character, and are shown as they are
    """

    def __init__(self, tokenizer: Any, skip_special: bool = False, most_unfinished: int | None = 8) -> None:
        self._tokenizer, self._skip_special, self._most_unfinished = tokenizer, skip_special, most_unfinished
        self._ids: list[int] = []
        self._first, self._shown = 0, 0  # tokens that are decoded for context; tokens whose text is out

    def put(self, token: int) -> str:
        """The text that is certain after this token."""
        self._ids.append(token)
        before, after = self._decoded(self._shown), self._decoded(len(self._ids))
        unfinished = after.endswith(UNFINISHED) and not self._is_overdue()
        if unfinished or len(after) <= len(before):
            return ""
        self._first, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def end(self) -> str:
        """The text of a character which is not complete."""
        before, after = self._decoded(self._shown), self._decoded(len(self._ids))
        self._shown = len(self._ids)
        return after[len(before) :]

    def _is_overdue(self) -> bool:
        return self._most_unfinished is not None and len(self._ids) - self._shown > self._most_unfinished

    def _decoded(self, stop: int) -> str:
        """The text of the tokens from the first one of the context on: how a token reads depends on those before it."""
        text: str = self._tokenizer.decode(self._ids[self._first : stop], skip_special_tokens=self._skip_special)
        return text


class TextStream:
    """Text of tokens as they come. `stopped` is the stop string that was found, if any; nothing follows it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._pieces, self._stops = Pieces(tokenizer, skip_special=True, most_unfinished=None), stops
        self._held = ""  # decoded, but may be the beginning of a stop string
        self.stopped: str | None = None

    def put(self, token: int) -> str:
        """The text that is certain after this token."""
        piece = self._pieces.put(token)
        return self._released(piece, last=False) if piece else ""

    def end(self) -> str:
        """The text that was held back; also that of a character which is not complete."""
        piece = self._pieces.end()
        return "" if self.stopped else self._released(piece, last=True)

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
