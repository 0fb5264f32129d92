"""Texts to evaluate on, and chunks of equal length that they are cut into.

Texts come from a folder, a file, lines of JSON, or the PG-19 test set on the hub; also as token ids. Which chunks are
chosen depends on a seed and the names of the texts only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from msrnn.errors import FileError, UsageError

PG19 = "emozilla/pg19-test"  # the 100 books of the test set, in a format that loads without custom code

_OTHER_TEXTS = "or give a folder of .txt files as the text"


class Document(NamedTuple):
    """A text that is read when it is needed. Its name is the same on any machine, and no other text has it."""

    name: str
    read: Callable[[], str]
    ids: Callable[[], list[int]] | None = None  # of a text that is given as token ids


def documents(source: Path | None) -> list[Document]:
    """All texts of a source, by name. None: the test set of PG-19.

    A folder has one text in each .txt file, a .jsonl file one in each line. A .npy file, or each .npy file of a folder
    without .txt files, has the token ids of one text.
    """
    check_source(source)
    if source is None:
        texts = _pg19()
    elif source.is_dir():
        texts = [Document(path.stem, partial(read_file, path)) for path in source.glob("*.txt")]
        texts = texts or [_open_tokenized(path) for path in source.glob("*.npy")]
        if not texts:
            raise UsageError(f"{source}: a folder without .txt files; give one with a .txt file for each text")
    elif source.suffix == ".jsonl":
        texts = _lines(source)
    elif source.suffix == ".npy":
        texts = [_open_tokenized(source)]
    else:
        texts = [Document(source.stem, partial(read_file, source))]
    return sorted(_check_names(texts, source), key=lambda document: document.name)


def check_source(source: Path | None) -> None:
    """Refuse a source of texts that does not exist, before anything is loaded; without a source, a missing package."""
    if source is None:
        check_datasets("PG-19", _OTHER_TEXTS)
    elif not source.is_dir() and not source.is_file():
        raise UsageError(f"{source}: no such file or folder; give a folder of .txt files, a .txt or a .jsonl file")


def check_datasets(what: str, instead: str) -> None:
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(
            f"{what} is loaded by the package datasets, which is not installed: pip install 'msrnn[eval]', {instead}"
        )


def _open_tokenized(path: Path) -> Document:
    def read() -> str:
        raise FileError("has token ids, but the text is needed", path, advice="give a .txt file")

    return Document(path.stem, read, partial(_ids, path))


def _ids(path: Path) -> list[int]:
    try:
        with path.open("rb") as file:
            ids = numpy.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        raise FileError(f"not a numpy array ({error})", path, advice="save the token ids with numpy.save") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise FileError(
            f"{ids.dtype} of shape {list(ids.shape)}", path, advice="must be a one-dimensional array of token ids"
        )
    tokens: list[int] = ids.tolist()
    return tokens


def read_file(path: Path) -> str:
    return decode_utf8(path.read_bytes(), path)


def decode_utf8(data: bytes, source: object) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source}: not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8"
        ) from error


def _lines(path: Path) -> list[Document]:
    """One text in each line, named by its `id` or `title`, or else by the line's number."""
    texts = []
    for number, line in enumerate(read_file(path).split("\n"), start=1):
        if not line.strip():
            continue
        row = _row(line, f"{path}, line {number}")
        name = row.get("id", row.get("title"))
        texts.append(_of(str(number if name is None else name), row["text"]))
    if not texts:
        raise FileError("empty", path, advice="give a text to read")
    return texts


def parse_line(line: str, where: str) -> Any:
    """A line of a .jsonl file."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # nested too deeply, or a number of thousands of digits
        raise UsageError(f"{where}: not JSON ({getattr(error, 'msg', error)}); correct the line") from error


def _row(line: str, where: str) -> dict[str, Any]:
    row = parse_line(line, where)
    if not (isinstance(row, dict) and isinstance(row.get("text"), str)):
        raise UsageError(f"{where}: no text; each line must be a JSON object with the field 'text'")
    return row


def _of(name: str, text: str) -> Document:
    return Document(name, lambda: text)


def _pg19() -> list[Document]:
    """Named by their number at Project Gutenberg, as the original files are."""
    rows = hub_rows(PG19, "test", "PG-19", _OTHER_TEXTS)
    return [_of(str(row["url"]).rstrip("/").rsplit("/", 1)[-1], row["text"]) for row in rows]


def hub_rows(name: str, split: str, what: str, instead: str, **more: str) -> Iterable[dict[str, Any]]:
    """The rows of a dataset on the hub. If it cannot be loaded, the error says why, and what to do `instead`."""
    check_datasets(what, instead)
    from datasets import load_dataset

    try:
        rows: Iterable[dict[str, Any]] = load_dataset(name, split=split, **more)
    except Exception as error:  # errors of datasets and of the network have no common class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UsageError(f"{name}: cannot be loaded from the hub ({reason}); check the network, {instead}") from error
    return rows


def _check_names(texts: list[Document], source: Path | None) -> list[Document]:
    name, times = Counter(document.name for document in texts).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{source or PG19}: {times} texts are named {name!r}; give each its own id")
    return texts


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
    """Take books in an order that the seed and their names decide, until enough of them have a chunk.

    Texts that are given as token ids need no tokenizer; without one, nothing is put in front of a chunk.
    """
    opening, cuts = opening_of(tokenizer) if tokenizer is not None else [], list[_Cut]()
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
