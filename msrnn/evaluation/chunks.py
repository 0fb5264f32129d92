"""Texts as chunks of equal length, and which of them are read: the same ones wherever and whenever it is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy

from msrnn.errors import UsageError
from msrnn.evaluation.texts import Document


class Chunk(NamedTuple):
    """`ids` are the opening and then the text's own tokens, from its token `start` on."""

    book: str
    start: int
    ids: list[int]


@dataclass(frozen=True)
class Choice:
    """How texts are cut, and which chunks are taken of which. More books or chunks contain those of fewer."""

    length: int = 4096  # tokens of a chunk, the opening among them
    books: int | None = None  # None: all
    chunks_per_book: int = 4
    seed: int = 0
    first: bool = False  # the first chunks of each text, and not those that the seed decides
    option: str = "--length"  # that the length was given by


@dataclass(frozen=True)
class Data:
    """The chunks that were chosen, and what was left out."""

    chunks: list[Chunk]
    opening: list[int]  # what the tokenizer itself puts in front of a text; often one token, or none
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
        """Tokens of a chunk that nothing predicts: the opening, or else the first."""
        return max(1, len(self.opening))

    @property
    def predicted(self) -> int:
        """Tokens of a chunk that are predicted, whatever predicts them."""
        return self.length - self.given

    @cached_property
    def fingerprint(self) -> str:
        return _digest(token for chunk in self.chunks for token in chunk.ids)

    def told(self) -> str:
        books = len({chunk.book for chunk in self.chunks})
        return (
            f"{len(self.chunks):,} of {self.available:,} chunks of {self.length:,} tokens, "
            f"from {books:,} of {self.offered:,} texts "
            f"(shorter than a chunk: {self.short:,}; tokens left over at the ends: {self.dropped:,})"
        )


def _digest(tokens: Any) -> str:
    return hashlib.sha256(numpy.fromiter(tokens, dtype="<i8").tobytes()).hexdigest()


def opening_of(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts in front of any text by itself; those it adds only in chats are none."""
    whole, plain = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])


class _Cut(NamedTuple):
    chunks: list[Chunk]  # those chosen
    whole: int  # chunks that there are
    rest: int  # tokens after them


def choose(found: Sequence[Document], tokenizer: Any, choice: Choice) -> Data:
    """Books in an order that the seed and their names decide, until there are enough that have a chunk."""
    opening, cuts = opening_of(tokenizer), list[_Cut]()
    if choice.length <= max(1, len(opening)):
        raise UsageError(
            f"{choice.option} {choice.length}: the first {max(1, len(opening))} are given, so nothing is predicted"
        )
    for book in sorted(found, key=lambda document: rank(choice.seed, document.name)):
        if choice.books is not None and sum(cut.whole > 0 for cut in cuts) == choice.books:
            break
        cuts.append(_cut(book, tokenizer, opening, choice))
    used = [cut for cut in cuts if cut.whole]
    if not used:
        longest = max((cut.rest for cut in cuts), default=0) + len(opening)
        raise UsageError(f"{choice.option} {choice.length}: the longest text has {longest:,} tokens; take fewer")
    chunks = sorted(chunk for cut in used for chunk in cut.chunks)
    counts = sum(cut.whole for cut in used), sum(cut.rest for cut in used)
    return Data(chunks, opening, choice.length, len(found), len(cuts) - len(used), *counts)


def _cut(book: Document, tokenizer: Any, opening: list[int], choice: Choice) -> _Cut:
    """A book's chunks lie end to end from its first token on; which are taken, the choice decides."""
    tokens = book.ids() if book.ids else list(tokenizer(book.read(), add_special_tokens=False)["input_ids"])
    room = choice.length - len(opening)
    whole, rest = divmod(len(tokens), room)
    order = list(range(whole))
    if not choice.first:
        order.sort(key=lambda i: rank(choice.seed, f"{book.name}/{i}"))
    starts = [i * room for i in order[: choice.chunks_per_book]]
    return _Cut([Chunk(book.name, start, opening + tokens[start : start + room]) for start in starts], whole, rest)


def rank(seed: int, name: str) -> bytes:
    """A random order that depends on nothing but these: neither on a library's version nor on what else there is."""
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()
