from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from msrnn.evaluation.data.texts import Choice, Data, Document, choose, documents, opening_of
from tests.helpers.letters import Letters


def contents(found: list[Document]) -> list[tuple[str, str]]:
    return [(document.name, document.read()) for document in found]


def test_a_folder_a_file_and_lines(tmp_path: Path) -> None:
    for name, text in {"b.txt": "two", "a.txt": "one\r\n", "c.md": "no"}.items():
        (tmp_path / name).write_bytes(text.encode())
    assert contents(documents(tmp_path)) == [("a", "one\r\n"), ("b", "two")]
    assert contents(documents(tmp_path / "c.md")) == [("c", "no")]
    rows = [{"text": "x\u2028y", "id": 7}, {"text": "z", "title": "Emma"}, {"text": "w"}]
    (tmp_path / "d.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert contents(documents(tmp_path / "d.jsonl")) == [("5", "w"), ("7", "x\u2028y"), ("Emma", "z")]


BAD = {
    "none": (None, "no such file"),
    "empty.jsonl": ("\n", "empty"),
    "nested.jsonl": ("[" * 100_000, "line 1: not JSON"),
    "digits.jsonl": ("9" * 5000, "line 1: not JSON"),
    "words.jsonl": ('{"text": "a"}\nwords\n', "line 2: not JSON"),
    "fields.jsonl": ('{"words": "a"}\n', "line 1: no text"),
    "twice.jsonl": ('{"text": "a", "id": 1}\n{"text": "b", "id": "1"}\n', "2 texts are named '1'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_source(name: str, tmp_path: Path) -> None:
    content, reason = BAD[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}.*{reason}"):
        documents(tmp_path / name)


def test_a_folder_of_nothing_and_text_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without \.txt"):
        documents(tmp_path)
    (tmp_path / "latin.txt").write_bytes("déjà".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8"):
        documents(tmp_path)[0].read()


def hub(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    module: Any = ModuleType("datasets")
    module.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)


def test_books_of_the_hub_are_named_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"url": f"http://www.gutenberg.org/ebooks/{n}", "text": f"book {n}"} for n in (20, 10)]
    hub(monkeypatch, lambda name, split: rows if (name, split) == ("emozilla/pg19-test", "test") else [])
    assert contents(documents(None)) == [("10", "book 10"), ("20", "book 20")]


def test_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub.\nmore of it")

    hub(monkeypatch, load)
    with pytest.raises(ValueError, match=r"\(Couldn't reach the Hub\); check the network, or give a folder") as caught:
        documents(None)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'msrnn\[eval\]', or give a folder"):
        documents(None)


def test_token_ids_are_the_chunks_of_their_text(tmp_path: Path) -> None:
    """Whether a text was tokenized here or before, on a machine that has it, chunks and their keys are the same."""
    for kind in ("words", "ids"):
        (tmp_path / kind).mkdir()
    for name in ("a", "b"):
        text = name * 25 + "c" * 10
        (tmp_path / "words" / f"{name}.txt").write_text(text)
        numpy.save(tmp_path / "ids" / f"{name}.npy", numpy.array([ord(letter) for letter in text], dtype=numpy.uint16))
    made = [choose(documents(tmp_path / kind), Letters(7), Choice(9, chunks_per_book=2)) for kind in ("words", "ids")]
    assert made[0] == made[1]
    alone = documents(tmp_path / "ids" / "b.npy")
    assert [document.name for document in alone] == ["b"]
    with pytest.raises(ValueError, match="the text is needed"):
        alone[0].read()


@pytest.mark.parametrize(
    ("array", "reason"), [([[1, 2]], r"shape \[1, 2\]"), ([0.5], "float64"), (None, "not a numpy array")]
)
def test_what_are_no_token_ids(array: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "text.npy"
    if array is None:
        path.write_text("Once upon a time")
    else:
        numpy.save(path, numpy.array(array))
    with pytest.raises(ValueError, match=reason):
        choose(documents(path), Letters(), Choice(2))


def test_an_empty_file_and_several_arrays_are_no_token_ids(tmp_path: Path) -> None:
    with (tmp_path / "several.npy").open("wb") as file:
        numpy.savez(file, ids=numpy.array([1, 2, 3]))
    (tmp_path / "empty.npy").touch()
    for name in ("empty", "several"):
        with pytest.raises(ValueError, match=rf"{name}\.npy: not a numpy array"):
            choose(documents(tmp_path / f"{name}.npy"), Letters(), Choice(2))


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

    def of(**given: Any) -> Data:
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


def test_the_first_tokens_of_every_text_that_has_them() -> None:
    texts = {"long": "abcdefghij" * 3, "longer": "klmnopqrst" * 5, "short": "uvw"}
    found = [Document(name, lambda name=name: texts[name]) for name in texts]  # type: ignore[misc]
    made = choose(found, Letters(), Choice(12, chunks_per_book=1, first=True))
    assert [(chunk.book, chunk.start) for chunk in made.chunks] == [("long", 0), ("longer", 0)]
    assert made.short == 1
