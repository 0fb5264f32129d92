"""Tokens as pieces of the text that they were made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msrnn.errors import UsageError
from msrnn.evaluation.data.chunks import Chunk, Data
from msrnn.evaluation.data.texts import Document

Span = tuple[int, int]  # of characters; empty for a token that stands for none, such as one that opens a text


@dataclass(frozen=True)
class Passage:
    """A chunk's tokens in the whole text that they are from."""

    text: str
    ids: list[int]
    spans: list[Span]

    @property
    def start(self) -> int:
        return min((start for start, stop in self.spans if start < stop), default=0)

    @property
    def stop(self) -> int:
        return max(stop for _, stop in self.spans)

    @property
    def pieces(self) -> list[str]:
        """What each token adds to the text: together they are all of it.

        Of tokens that share a character, which only its bytes tell apart, the first has it and the others are empty.
        """
        found, told = [], self.start
        for _, stop in self.spans:
            found.append(self.text[told:stop])
            told = max(told, stop)
        return found


def passage(text: str, tokenizer: Any, opening: bool = False, tokens: int | None = None) -> Passage:
    """A text and its first tokens, with the ones that open a text where it opens one."""
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(f"{type(tokenizer).__name__} does not say where its tokens are from: take one that is fast")
    found = tokenizer(text, add_special_tokens=opening, return_offsets_mapping=True)
    return Passage(text, list(found["input_ids"])[:tokens], [(a, b) for a, b in found["offset_mapping"]][:tokens])


def passages(data: Data, found: Sequence[Document], tokenizer: Any) -> list[Passage]:
    """Of each chunk, in order; every text is read once more."""
    texts = {document.name: document for document in found}
    whole: dict[str, Passage] = {}
    for name in dict.fromkeys(chunk.book for chunk in data.chunks):
        whole[name] = passage(texts[name].read(), tokenizer)
    return [_part(whole[chunk.book], chunk, data.opening) for chunk in data.chunks]


def _part(book: Passage, chunk: Chunk, opening: list[int]) -> Passage:
    tokens = slice(chunk.start, chunk.start + len(chunk.ids) - len(opening))
    if opening + book.ids[tokens] != chunk.ids:
        raise UsageError(f"{chunk.book}: the text has changed since it was cut into chunks; start anew")
    start = book.spans[tokens][0][0]
    return Passage(book.text, chunk.ids, [*[(start, start)] * len(opening), *book.spans[tokens]])
