"""The prefix cache on disk: prefixes that were evicted from memory. They survive a restart."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msrnn.core.atomic import make_private_folder, remove_unfinished
from msrnn.engine.executor import Executor, StateHandle
from msrnn.engine.writer import Writer
from msrnn.errors import FileError, UsageError

NAME = re.compile(r"(\d{1,12})-([0-9a-f]{64})\.safetensors")
MOST_WAITING = 2  # states that wait to be written; further ones are dropped, so that sessions do not wait for them


class Key(NamedTuple):
    """What a file is named after."""

    length: int
    digest: str  # SHA-256 of the owner and the tokens

    @property
    def name(self) -> str:
        return f"{self.length}-{self.digest}.safetensors"


class PrefixCacheFiles:
    """States after the tokens that they have read. The least recently used file is deleted first.

    A file that is damaged, or that another model has written, is removed when it is to be read. Other files in the
    folder are left alone.

    executor  saves and loads states, and refuses those of another model
    most      bytes of all files; one more is there while it is written
    """

    def __init__(self, executor: Executor, folder: Path, most: int, writer: Writer) -> None:
        self._executor, self._folder, self._most, self._writer = executor, folder, most, writer
        self._lock = threading.Lock()
        self._waiting = self.hits = self.errors = 0
        make_private_folder(folder)
        remove_unfinished(folder, lambda name: NAME.fullmatch(name) is not None)
        found = [(path.stat(), Key(int(m[1]), m[2])) for path in folder.iterdir() if (m := NAME.fullmatch(path.name))]
        found.sort(key=lambda file: file[0].st_mtime_ns)
        self._sizes: OrderedDict[Key, int] = OrderedDict((key, stat.st_size) for stat, key in found)  # as used
        self._make_room()

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def nbytes(self) -> int:
        return sum([*self._sizes.values()])

    def put(self, owner: str, tokens: Sequence[int], state: StateHandle) -> None:
        """Have a state on the host written, which nobody may change, unless its file is there already."""
        key = _keys(owner, tokens, {len(tokens)})[0]
        if key in self._sizes or state.nbytes > self._most:
            return
        with self._lock:
            if self._waiting >= MOST_WAITING:
                return
            self._waiting += 1
        self._writer.submit(lambda: self._write(key, tokens, state))

    def find_longest(
        self, owner: str, prompt: Sequence[int], longer_than: int
    ) -> tuple[Sequence[int], StateHandle] | None:
        """The owner's state of the longest prefix with more tokens than this, but not of the whole prompt."""
        lengths = {key.length for key in [*self._sizes] if longer_than < key.length < len(prompt)}
        for key in _keys(owner, prompt, lengths)[::-1]:
            if key in self._sizes and (state := self._read(key, prompt)) is not None:
                self.hits += 1
                return prompt[: key.length], state
        return None

    def _read(self, key: Key, prompt: Sequence[int]) -> StateHandle | None:
        path = self._folder / key.name
        try:
            state = self._executor.load(path)
            notes = self._executor.describe(path)["notes"]
            if notes != {"tokens": [*prompt[: key.length]]} or state.seen != key.length:
                raise FileError("not what its name says", path)
            os.utime(path)
        except (UsageError, OSError, KeyError, TypeError):
            self._remove(key)
            return None
        with self._lock:
            if key in self._sizes:  # or else it was deleted meanwhile, for others that were written
                self._sizes.move_to_end(key)
        return state

    def _write(self, key: Key, tokens: Sequence[int], state: StateHandle) -> None:
        path = self._folder / key.name
        try:
            self._executor.save(state, path, {"tokens": [*tokens]})
            with self._lock:
                self._sizes[key] = path.stat().st_size
            self._make_room()
        except (UsageError, OSError):  # a full disk, for example: the state is read anew when it is needed
            self.errors += 1
        finally:
            with self._lock:
                self._waiting -= 1

    def _make_room(self) -> None:
        while self.nbytes > self._most:
            self._remove(next(iter(self._sizes)))

    def _remove(self, key: Key) -> None:
        with self._lock:
            self._sizes.pop(key, None)
        (self._folder / key.name).unlink(missing_ok=True)


def _keys(owner: str, tokens: Sequence[int], lengths: set[int]) -> list[Key]:
    """The keys of the prefixes of these lengths, in order."""
    digest, done, found = hashlib.sha256(owner.encode()), 0, []
    for length in sorted(lengths):
        digest.update(array("q", tokens[done:length]).tobytes())
        done = length
        found.append(Key(length, digest.hexdigest()))
    return found
