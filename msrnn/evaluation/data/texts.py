"""Texts to evaluate on: a folder, a file, lines of JSON, or the PG-19 test set from the hub; also as token ids."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from msrnn.errors import UsageError

PG19 = "emozilla/pg19-test"  # the 100 books of the test set, in a format that loads without custom code


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
    if source is None:
        texts = _pg19()
    elif source.is_dir():
        texts = [Document(path.stem, partial(read_file, path)) for path in source.glob("*.txt")]
        texts = texts or [_tokenized(path) for path in source.glob("*.npy")]
        if not texts:
            raise UsageError(f"{source}: a folder without .txt files; give one with a .txt file for each text")
    elif not source.is_file():
        raise UsageError(f"{source}: no such file or folder; give a folder of .txt files, a .txt or a .jsonl file")
    elif source.suffix == ".jsonl":
        texts = _lines(source)
    elif source.suffix == ".npy":
        texts = [_tokenized(source)]
    else:
        texts = [Document(source.stem, partial(read_file, source))]
    return sorted(_check_names(texts, source), key=lambda document: document.name)


def _tokenized(path: Path) -> Document:
    def read() -> str:
        raise UsageError(f"{path}: has token ids, but the text is needed; give a .txt file")

    return Document(path.stem, read, partial(_ids, path))


def _ids(path: Path) -> list[int]:
    try:
        with path.open("rb") as file:
            ids = numpy.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        raise UsageError(f"{path}: not a numpy array ({error}); save the token ids with numpy.save") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UsageError(
            f"{path}: {ids.dtype} of shape {list(ids.shape)}; must be a one-dimensional array of token ids"
        )
    tokens: list[int] = ids.tolist()
    return tokens


def read_file(path: Path) -> str:
    return decoded(path.read_bytes(), path)


def decoded(data: bytes, source: object) -> str:
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
        raise UsageError(f"{path}: empty; give a text to read")
    return texts


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg}); correct the line") from error
    if not (isinstance(row, dict) and isinstance(row.get("text"), str)):
        raise UsageError(f"{where}: no text; each line must be a JSON object with the field 'text'")
    return row


def _of(name: str, text: str) -> Document:
    return Document(name, lambda: text)


def _pg19() -> list[Document]:
    """Named by their number at Project Gutenberg, as the original files are."""
    rows = hub_rows(PG19, "test", "PG-19", "or give a folder of .txt files as the text")
    return [_of(str(row["url"]).rstrip("/").rsplit("/", 1)[-1], row["text"]) for row in rows]


def hub_rows(name: str, split: str, what: str, instead: str, **more: str) -> Iterable[dict[str, Any]]:
    """The rows of a dataset on the hub. If it cannot be loaded, the error says why, and what to do `instead`."""
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(
            f"{what} is loaded by the package datasets, which is not installed: pip install 'msrnn[eval]', {instead}"
        )
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
