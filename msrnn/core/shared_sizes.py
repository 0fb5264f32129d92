"""Bytes of states in files, where several states may have the same segment files: each file counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class FileSizes(NamedTuple):
    """Bytes of a state's own file, and of its segment files by name."""

    own: int
    segments: Mapping[str, int] = {}

    @property
    def nbytes(self) -> int:
        return self.own + sum(self.segments.values())


class SharedSizes(Generic[K]):
    """The files of states, by a key for each state.

    nbytes  of all files
    """

    def __init__(self) -> None:
        self._sizes: dict[K, FileSizes] = {}
        self._users = Counter[str]()  # states that have a segment
        self.nbytes = 0

    def set(self, key: K, sizes: FileSizes) -> None:
        """Add a state, or replace its files."""
        self.pop(key)
        self._sizes[key] = sizes
        self.nbytes += sizes.own + sum(size for name, size in sizes.segments.items() if not self._users[name])
        self._users.update(sizes.segments.keys())

    def pop(self, key: K) -> None:
        """Forget a state, if it is there."""
        self.nbytes -= self.count_freed([key])
        sizes = self._sizes.pop(key, FileSizes(0))
        self._users.subtract(sizes.segments.keys())
        for name in sizes.segments:
            if not self._users[name]:
                del self._users[name]

    def count_freed(self, keys: Iterable[K]) -> int:
        """The bytes that are free when these states are deleted: those that no other state has."""
        sizes = [self._sizes[key] for key in keys if key in self._sizes]
        users = Counter(name for one in sizes for name in one.segments)
        segments = {name: size for one in sizes for name, size in one.segments.items()}
        return sum(one.own for one in sizes) + sum(
            size for name, size in segments.items() if users[name] == self._users[name]
        )
