"""The prefix cache on disk: prefixes that were evicted from memory. They survive a restart.

A file has the archive of its state, if there is one, and serves only prompts that are read with the same recall.
"""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msrnn.core.state_folder import LimitedStateFolder
from msrnn.engine.executor import Executor, StateHandle
from msrnn.engine.writer import Writer
from msrnn.errors import FileError, UsageError

NAME = re.compile(r"(\d{1,12})-[0-9a-f]{64}")
MOST_WAITING = 2  # states that wait to be written; further ones are dropped, so that sessions do not wait for them


class Key(NamedTuple):
    """The name of a file."""

    length: int
    digest: str  # SHA-256 of the owner and the tokens

    @property
    def name(self) -> str:
        return f"{self.length}-{self.digest}"


class PrefixCacheFiles:
    """Cached prefixes in a folder. The least recently used file is deleted first.

    A file that is damaged, or that another model has written, is removed when it is read. Other files in the folder are
    left alone.

    executor  saves and loads states, and refuses those of another model
    most      bytes of all files; one more is there while it is written
    """

    def __init__(self, executor: Executor, folder: Path, most: int, writer: Writer) -> None:
        self._most, self._writer = most, writer
        self._facts, recall = executor.facts, executor.facts.recall
        self._notes = {} if recall is None else {"recall": recall.name}  # prefixes that were read so
        self._lock = threading.Lock()
        self._waiting = self.hits = self.errors = 0
        self._folder = LimitedStateFolder[StateHandle](folder, executor, _is_name, most)

    def __len__(self) -> int:
        return len(self._folder)

    @property
    def nbytes(self) -> int:
        return self._folder.nbytes

    def put(self, owner: str, tokens: Sequence[int], state: StateHandle) -> None:
        """Queue the write of a state on the host, which must not change, unless its file exists already."""
        key = _keys(owner, tokens, {len(tokens)})[0]
        if key.name in self._folder or state.nbytes + self._facts.archive_nbytes(len(tokens)) > self._most:
            return
        with self._lock:
            if self._waiting >= MOST_WAITING:
                return
            self._waiting += 1
        self._writer.submit(lambda: self._write(key, tokens, state))

    def find_longest(
        self, owner: str, prompt: Sequence[int], longer_than: int, longest: int | None = None
    ) -> tuple[Sequence[int], StateHandle] | None:
        """The owner's longest cached prefix with more tokens than this, at most `longest`; not the whole prompt."""
        found = {int(name.partition("-")[0]) for name in self._folder.list_names()}
        most = len(prompt) - 1 if longest is None else min(longest, len(prompt) - 1)
        lengths = {length for length in found if longer_than < length <= most}
        for key in _keys(owner, prompt, lengths)[::-1]:
            if key.name in self._folder and (state := self._read(key, prompt)) is not None:
                self.hits += 1
                return prompt[: key.length], state
        return None

    def _read(self, key: Key, prompt: Sequence[int]) -> StateHandle | None:
        try:
            state, description = self._folder.load(key.name)
            expected = {"tokens": [*prompt[: key.length]], **self._notes}
            if description["notes"] != expected or state.seen != key.length:
                raise FileError("has other tokens than its name", self._folder.path_of(key.name))
        except (UsageError, OSError, KeyError, TypeError):
            self._folder.delete(key.name)
            return None
        return state

    def _write(self, key: Key, tokens: Sequence[int], state: StateHandle) -> None:
        try:
            self._folder.save(key.name, state, {"tokens": [*tokens], **self._notes})
        except (UsageError, OSError):  # a full disk, for example: the prefix is prefilled again when it is needed
            self.errors += 1
        finally:
            with self._lock:
                self._waiting -= 1


def _is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def _keys(owner: str, tokens: Sequence[int], lengths: set[int]) -> list[Key]:
    """The keys of the prefixes of these lengths, in order."""
    digest, done, found = hashlib.sha256(owner.encode()), 0, []
    for length in sorted(lengths):
        digest.update(array("q", tokens[done:length]).tobytes())
        done = length
        found.append(Key(length, digest.hexdigest()))
    return found
