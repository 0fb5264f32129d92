from __future__ import annotations

import hashlib
import struct

import pytest
from letters import Letters

from msrnn.evaluation.data.chunks import Choice, Data, choose, opening_of
from msrnn.evaluation.data.texts import Document


def test_what_opens_a_text() -> None:
    assert opening_of(Letters()) == []
    assert opening_of(Letters(1)) == [1]
    assert opening_of(Letters(1, 2, closing=(3,))) == [1, 2]
    assert opening_of(Letters(closing=(3,))) == []


def books(**lengths: int) -> list[Document]:
    def of(name: str, length: int) -> Document:
        return Document(name, lambda: "".join(chr(1000 * ord(name) + i) for i in range(length)))

    return [of(name, length) for name, length in lengths.items()]


def test_ragged_ends_and_short_books_are_counted() -> None:
    data = choose(books(a=25, b=9, c=30), Letters(), Choice(length=10, chunks_per_book=99))
    assert [(chunk.book, chunk.start) for chunk in data.chunks] == [("a", 0), ("a", 10), ("c", 0), ("c", 10), ("c", 20)]
    assert (data.offered, data.short, data.available, data.dropped) == (3, 1, 5, 5)
    assert data.summary() == (
        "5 of 5 chunks of 10 tokens, from 2 of 3 texts (shorter than a chunk: 1; tokens left over at the ends: 5)"
    )
    assert (data.given, data.predicted) == (1, 9)


def test_the_first_token_is_part_of_every_chunk() -> None:
    data = choose(books(a=25), Letters(1), Choice(length=10, chunks_per_book=99))
    assert [chunk.ids[0] for chunk in data.chunks] == [1, 1]
    assert [chunk.start for chunk in data.chunks] == [0, 9]
    read = [token for chunk in data.chunks for token in chunk.ids[1:]]
    assert read == [1000 * ord("a") + i for i in range(18)]
    assert (data.given, data.predicted, data.dropped) == (1, 9, 7)
    two = choose(books(a=25), Letters(1, 2), Choice(length=10))
    assert (two.given, two.predicted) == (2, 8)


def chosen(data: Data) -> set[tuple[str, int]]:
    return {(chunk.book, chunk.start) for chunk in data.chunks}


def test_the_seed_decides_and_more_contains_fewer() -> None:
    shelf = books(a=200, b=200, c=200, d=200, e=5)

    def of(**given: int) -> Data:
        return choose(shelf, Letters(), Choice(length=10, **given))

    some = of(books=2, chunks_per_book=3)
    assert len(some.chunks) == 6
    assert len(chosen(some)) == 6
    assert some == choose(shelf[::-1], Letters(), Choice(length=10, books=2, chunks_per_book=3))
    assert some.fingerprint == of(books=2, chunks_per_book=3).fingerprint
    others = [of(books=2, chunks_per_book=3, seed=seed) for seed in range(1, 5)]
    assert len({data.fingerprint for data in others} | {some.fingerprint}) == 5
    assert chosen(some) < chosen(of(books=3, chunks_per_book=3))
    assert chosen(some) < chosen(of(books=2, chunks_per_book=5))
    assert len({chunk.book for chunk in of(books=4).chunks}) == 4  # the short one is passed over
    assert some.chunks[0].ids[0] == 1000 * ord(some.chunks[0].book) + some.chunks[0].start


def test_the_choice_is_the_same_everywhere() -> None:
    data = choose(books(a=200, b=200, c=200), Letters(), Choice(length=10, books=2, chunks_per_book=2))
    assert sorted(chosen(data)) == [("b", 110), ("b", 160), ("c", 30), ("c", 100)]
    tokens = [1000 * ord(book) + start + i for book, start in sorted(chosen(data)) for i in range(10)]
    assert data.fingerprint == hashlib.sha256(struct.pack("<40q", *tokens)).hexdigest()


def test_chunks_are_known_by_their_content_and_their_opening() -> None:
    shelf = books(a=40)
    plain = choose(shelf, Letters(), Choice(length=10))
    letter = 1000 * ord("a")
    assert len(set(plain.keys)) == 4
    assert choose(shelf, Letters(letter - 1), Choice(length=10)).keys[0] not in plain.keys
    same = Data(plain.chunks, [letter], 10, 1, 0, 4, 0)
    assert not set(same.keys) & set(plain.keys)


def test_too_long_and_too_short_chunks() -> None:
    with pytest.raises(ValueError, match="length=50: the longest text has 40 tokens"):
        choose(books(a=40, b=3), Letters(), Choice(length=50))
    with pytest.raises(ValueError, match="length=2: the first 2 tokens are given"):
        choose(books(a=40), Letters(1, 2), Choice(length=2))
