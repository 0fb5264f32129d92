"""Cut texts into chunks of equal length, and choose chunks by a seed and the names of the texts only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy

from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import Document


class Chunk(NamedTuple):
    """A chunk of a text: `ids` are the opening, then the text's own tokens from its token `start` on."""

    book: str
    start: int
    ids: list[int]


@dataclass(frozen=True)
class Choice:
    """How texts are cut into chunks, and which are taken. A larger choice contains the smaller ones."""

    length: int = 4096  # tokens of a chunk, the opening among them
    books: int | None = None  # None: all
    chunks_per_book: int = 4
    seed: int = 0
    first: bool = False  # the first chunks of each text, instead of those that the seed decides
    length_name: str = "length"  # what error messages call the length


@dataclass(frozen=True)
class Data:
    """The chosen chunks, and what was left out."""

    chunks: list[Chunk]
    opening: list[int]  # tokens that the tokenizer puts in front of a text, often one or none
    length: int
    offered: int  # books
    short: int  # books without a whole chunk
    available: int  # chunks of the books that were read
    dropped: int  # tokens at the ends of those books, too few for a chunk
    keys: list[str] = field(init=False)  # of each chunk, by its content

    def __post_init__(self) -> None:
        keys = [_digest([len(self.opening), *chunk.ids])[:16] for chunk in self.chunks]
        object.__setattr__(self, "keys", keys)

    @property
    def given(self) -> int:
        """Tokens of a chunk that are not predicted: the opening, or else the first token."""
        return max(1, len(self.opening))

    @property
    def predicted(self) -> int:
        """Tokens of a chunk that are predicted."""
        return self.length - self.given

    @cached_property
    def fingerprint(self) -> str:
        return _digest(token for chunk in self.chunks for token in chunk.ids)

    def summary(self) -> str:
        books = len({chunk.book for chunk in self.chunks})
        return (
            f"{len(self.chunks):,} of {self.available:,} chunks of {self.length:,} tokens, "
            f"from {books:,} of {self.offered:,} texts "
            f"(shorter than a chunk: {self.short:,}; tokens left over at the ends: {self.dropped:,})"
        )


def _digest(tokens: Any) -> str:
    return hashlib.sha256(numpy.fromiter(tokens, dtype="<i8").tobytes()).hexdigest()


def opening_of(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts in front of every text, outside chat templates."""
    whole, plain = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])


class _Cut(NamedTuple):
    chunks: list[Chunk]  # chosen ones
    whole: int  # chunks of the book
    rest: int  # tokens after the last chunk


def choose(texts: Sequence[Document], tokenizer: Any, choice: Choice) -> Data:
    """Take books in an order that the seed and their names decide, until enough of them have a chunk."""
    opening, cuts = opening_of(tokenizer), list[_Cut]()
    if choice.length <= max(1, len(opening)):
        raise UsageError(
            f"{choice.length_name}={choice.length}: the first {max(1, len(opening))} tokens are given, "
            "so nothing is predicted; use a larger number"
        )
    for book in sorted(texts, key=lambda document: rank(choice.seed, document.name)):
        if choice.books is not None and sum(cut.whole > 0 for cut in cuts) == choice.books:
            break
        cuts.append(_cut(book, tokenizer, opening, choice))
    used = [cut for cut in cuts if cut.whole]
    if not used:
        longest = max((cut.rest for cut in cuts), default=0) + len(opening)
        raise UsageError(
            f"{choice.length_name}={choice.length}: the longest text has {longest:,} tokens; use a smaller number"
        )
    chunks = sorted(chunk for cut in used for chunk in cut.chunks)
    counts = sum(cut.whole for cut in used), sum(cut.rest for cut in used)
    return Data(chunks, opening, choice.length, len(texts), len(cuts) - len(used), *counts)


def _cut(book: Document, tokenizer: Any, opening: list[int], choice: Choice) -> _Cut:
    """Cut a book into chunks, end to end from its first token on, and take some of them."""
    tokens = book.ids() if book.ids else list(tokenizer(book.read(), add_special_tokens=False)["input_ids"])
    room = choice.length - len(opening)
    whole, rest = divmod(len(tokens), room)
    order = list(range(whole))
    if not choice.first:
        order.sort(key=lambda i: rank(choice.seed, f"{book.name}/{i}"))
    starts = [i * room for i in order[: choice.chunks_per_book]]
    return _Cut([Chunk(book.name, start, opening + tokens[start : start + room]) for start in starts], whole, rest)


def rank(seed: int, name: str) -> bytes:
    """A random order that depends on a seed and names alone, and not on a library's version or on other names."""
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()
