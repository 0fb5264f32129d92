"""The detokenizer: the text of an answer, token by token.

Only whole characters are returned, and no text that may turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for a character whose last bytes are missing
MOST_UNFINISHED = 3  # of these, for one character
CONTEXT = 8  # tokens that are decoded with the next one, at least: how a token reads depends on those before it


class Detokenizer:
    """Incremental text: what each token adds. A character of several tokens is added by the last of them.

    A call decodes a few tokens only, however long the text is.

    skip_special  special tokens add nothing; otherwise their names
    shown         special tokens that add their names also then
    before        tokens whose text is out: a tokenizer may write a space between two tokens, and none before the first
    """

    def __init__(
        self, tokenizer: Any, skip_special: bool = False, before: Sequence[int] = (), shown: Collection[int] = ()
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._left_out = list_special_tokens(tokenizer) - {*shown} if skip_special and shown else None
        self._ids = [*before[-CONTEXT:]]  # the last tokens
        self._text = self._decode(self._ids) if self._ids else ""  # of these
        self._shown = len(self._text)  # characters of it that are out

    def put(self, token: int) -> str:
        """The text that is certain after this token."""
        text = self._decode([*self._ids, token])
        if text == self._text != "" and not self._decode([token]):
            return ""  # a token without text need not be decoded again
        self._ids.append(token)
        self._text = text
        unfinished = len(text) - len(text.rstrip(UNFINISHED))
        piece = self._show(len(text) - min(unfinished, MOST_UNFINISHED))
        if len(self._ids) > 2 * CONTEXT:
            self._shorten()
        return piece

    def end(self) -> str:
        """The text of an incomplete last character."""
        return self._show(len(self._text))

    def _show(self, stop: int) -> str:
        start, self._shown = self._shown, max(self._shown, stop)
        return self._text[start:stop]

    def _shorten(self) -> None:
        """Forget the first tokens, if the others read as they did after them."""
        hidden = len(self._text) - self._shown
        for count in range(CONTEXT, 2 * CONTEXT):
            text = self._decode(self._ids[-count:])
            if self._text.endswith(text) and len(text) >= hidden and bool(text) == bool(self._text):
                self._ids, self._text, self._shown = self._ids[-count:], text, len(text) - hidden
                return

    def _decode(self, ids: list[int]) -> str:
        if self._left_out is not None:
            named: str = self._tokenizer.decode([token for token in ids if token not in self._left_out])
            return named
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return text


def list_special_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that `decode` leaves out with `skip_special_tokens`."""
    flagged = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(flagged | {*tokenizer.all_special_ids})


class StopString:
    """Finds a string in text that comes character by character, in constant time each (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0  # characters of it that the text so far ends with
        self._shorter = [0] * (len(text) + 1)  # the next shorter beginning that the text then ends with as well
        for end in range(1, len(text)):
            self._shorter[end + 1] = self._next(self._shorter[end], text[end])

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched]
        return matched + (self.text[matched] == character)

    def put(self, character: str) -> bool:
        """Whether the text ends with the string now; nothing may follow then."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.text)

    def go_on(self) -> None:
        """Look for the next one after the text ended with the string, which may share characters with it."""
        if self.matched == len(self.text):
            self.matched = self._shorter[self.matched]


class TextStream:
    """A detokenizer with stop strings. `stopped` is the stop string that was found, if any; no text follows it.

    The stop string that ends first is found; of several that end there, the longest. Those in the text of the tokens
    `before`, which is out already, are not looked for, and none ends the text with one of its first `least - 1` tokens.
    Special tokens add no text, but for the names of those that are `shown`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        before: Sequence[int] = (),
        least: int = 0,
        shown: Collection[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=True, before=before, shown=shown)
        self._stops, self._missing = [StopString(stop) for stop in stops], least  # tokens that must come before the end
        self._held = ""  # decoded, but may be the beginning of a stop string
        self.stopped: str | None = None

    def put(self, token: int) -> str:
        """The text that is certain after this token."""
        self._missing -= 1
        piece = self._detokenizer.put(token)
        return self._release(piece, last=False) if piece else ""

    def end(self) -> str:
        """The text that was held back, and that of an incomplete last character."""
        piece = self._detokenizer.end()
        return "" if self.stopped else self._release(piece, last=True)

    def _release(self, piece: str, last: bool) -> str:
        text = self._held + piece
        if self._stops:
            for place, character in enumerate(piece, len(self._held) + 1):
                found = [stop.text for stop in self._stops if stop.put(character)]
                if self._missing > 0:
                    for stop in self._stops:
                        stop.go_on()
                elif found:
                    self.stopped, self._held = max(found, key=len), ""
                    return text[: place - len(self.stopped)]
        held = 0 if last else max((stop.matched for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
