"""The prefix cache: states by the tokens that they have read, how many of them are protected, and their own size.

A prompt that begins with the tokens of a cached prefix reads only the rest.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msrnn.engine.executor import Executor, Place, StateHandle
from msrnn.engine.prefix_cache_files import PrefixCacheFiles

_Key = tuple[int, int, int, int]  # length, protected tokens, own size, hash


class Tokens(NamedTuple):
    """The tokens of a request. Owners, such as API keys, do not share cached prefixes."""

    owner: str
    ids: array[int]

    def first(self, length: int) -> Tokens:
        return Tokens(self.owner, self.ids[:length])


class CachedPrefix(NamedTuple):
    """An entry: the state of one sequence after exactly these tokens."""

    tokens: Tokens
    state: StateHandle
    protected: int = 0  # the first tokens, which the state does not evict
    size: int = 0  # of its own; 0: that of the executor's states

    @property
    def nbytes(self) -> int:
        """Bytes without the archive."""
        return self.state.nbytes + self.length * self.tokens.ids.itemsize

    @property
    def length(self) -> int:
        return len(self.tokens.ids)


class PrefixCache:
    """Cached prefixes in bounded memory, on the device first, then on the host; the least recently used one is evicted.

    On a CPU, both limits are added. With `files`, evicted prefixes are written to disk, without their logits: so a file
    serves prompts that are longer than its prefix, and not the prefix itself as a prompt. If tokens are protected, or
    the state has a size of its own, no file is written. `ends`: also cache whole prompts and answers. `archive_bytes`
    limits the archives of all entries in memory, wherever they are: they come in addition.
    """

    def __init__(
        self,
        executor: Executor,
        device_bytes: int,
        host_bytes: int,
        files: PrefixCacheFiles | None = None,
        ends: bool = True,
        archive_bytes: int = 0,
    ) -> None:
        self._executor, self.files, self._ends = executor, files, ends
        self._most_archived = archive_bytes
        self._is_host = executor.facts.device == "cpu"
        if self._is_host:
            device_bytes, host_bytes = device_bytes + host_bytes, 0
        self._most: dict[Place, int] = {"device": device_bytes, "host": host_bytes}
        self._tiers: dict[Place, OrderedDict[_Key, CachedPrefix]] = {
            "device": OrderedDict(),
            "host": OrderedDict(),
        }
        self._bytes: dict[Place, int] = {"device": 0, "host": 0}
        self.archive_nbytes = 0
        self._sorted: list[Tokens] = []  # of all entries
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return sum(len(tier) for tier in self._tiers.values())

    @property
    def active(self) -> bool:
        return any(self._most.values()) or self.files is not None

    @property
    def keeps_ends(self) -> bool:
        return self.active and self._ends

    @property
    def nbytes(self) -> int:
        return sum(self._bytes.values())

    def put(self, ids: Sequence[int], state: StateHandle, owner: str = "", protect: int = 0, size: int = 0) -> None:
        """Add the state of one sequence, which must not change from now on; it protects the first `protect` tokens."""
        tokens, protected = _tokens(owner, ids), min(protect, len(ids))
        key, entry = (len(ids), protected, size, _hashes(tokens)[-1]), CachedPrefix(tokens, state, protected, size)
        self._pop("host", key)
        before = self._pop("device", key)
        if before is not None and before.tokens == tokens and before.state.has_logits and not state.has_logits:
            entry = before  # the same state, which serves a whole prompt as well
        self._make_room_for_archive(entry)
        if entry.nbytes <= self._most["device"] and self._archive_fits(entry):
            self._add("device", key, entry)
        else:
            self._push_out("device", key, entry)
        self._make_room()

    def find_longest(
        self, prompt: Sequence[int], owner: str = "", protect: int = 0, longest: int | None = None, size: int = 0
    ) -> CachedPrefix | None:
        """The longest cached prefix of a prompt, on the device; that of a whole prompt must have its logits.

        Its state must protect the same tokens as the prompt, of which the first `protect` are protected, and have the
        same size. It has at most `longest` tokens.
        """
        longest = len(prompt) if longest is None else longest
        entry = self._find_in_memory(_tokens(owner, prompt), protect, longest, size)
        files, length = None if protect or size else self.files, entry.length if entry else 0
        if files is not None and (found := files.find_longest(owner, prompt, length, longest)):
            ids, state = found
            entry = CachedPrefix(_tokens(owner, ids), state)
            self.put(ids, state, owner=owner)
        if entry is None:
            self.misses += 1
        else:
            self.hits += 1
        return entry

    def _find_in_memory(self, prompt: Tokens, protect: int, longest: int, size: int) -> CachedPrefix | None:
        """The longest prefix in memory; shorter ones count as used, too: later prompts may share only these."""
        hashes = _hashes(prompt)
        lengths = {length for tier in self._tiers.values() for length, *_ in tier if length <= longest}
        found: list[tuple[Place, _Key]] = []
        for length in sorted(lengths, reverse=True):
            key = length, min(protect, length), size, hashes[length - 1]
            for name, tier in self._tiers.items():
                entry = tier.get(key)
                if entry is None or entry.tokens != prompt.first(length):
                    continue
                if length == len(prompt.ids) and not entry.state.has_logits:
                    continue
                found.append((name, key))
        if not found:
            return None
        used = self._use(*found[0])
        for name, key in found[1:]:
            if key in self._tiers[name]:
                self._tiers[name].move_to_end(key)
        return used

    def find_shared_lengths(self, prompt: Sequence[int], others: Iterable[Sequence[int]], owner: str = "") -> list[int]:
        """The lengths of the prefixes that a prompt shares with other prompts of its owner, and with the cache.

        In ascending order, each less than the length of the prompt.
        """
        tokens = _tokens(owner, prompt)
        place = bisect_left(self._sorted, tokens)
        near = self._sorted[max(0, place - 1) : place + 1]  # no other entry shares a longer prefix
        known = [other.ids for other in near if other.owner == owner]
        return sorted({_common_length(tokens.ids, array("i", other)) for other in [*known, *others]})

    def _use(self, name: Place, key: _Key) -> CachedPrefix:
        """Make an entry the most recently used one; an entry on the host returns to the device, if it fits there."""
        entry = self._pop(name, key)
        assert entry is not None
        on_device = self._copy(entry, "device") if name == "host" else entry
        if entry.nbytes <= self._most["device"]:
            self._add("device", key, on_device)
        else:
            self._add("host", key, entry)
        self._make_room()
        return on_device

    def _make_room(self) -> None:
        """Move entries from the device to the host, and from the host to files, until the rest fits."""
        for name, tier in self._tiers.items():
            while self._bytes[name] > self._most[name]:
                key = next(iter(tier))
                entry = self._pop(name, key)
                assert entry is not None
                self._push_out(name, key, entry)

    def _make_room_for_archive(self, entry: CachedPrefix) -> None:
        """Evict entries until the archive of a new one fits with theirs; the host has those used longest ago."""
        places: tuple[Place, ...] = ("host", "device") if self._archive_fits(entry) else ()
        for name in places:
            while self._tiers[name] and not self._archive_fits(entry, self.archive_nbytes):
                evicted = self._pop(name, next(iter(self._tiers[name])))
                assert evicted is not None
                self._write(name, evicted)

    def _push_out(self, name: Place, key: _Key, entry: CachedPrefix) -> None:
        """Move an entry out of a memory: from the device to the host, or to a file if it does not fit there."""
        if name == "device" and entry.nbytes <= self._most["host"] and self._archive_fits(entry):
            self._add("host", key, self._copy(entry, "host"))
        else:
            self._write(name, entry)

    def _write(self, name: Place, entry: CachedPrefix) -> None:
        """Write an entry that left a memory to a file, if there is a folder for them."""
        if self.files is not None and not (entry.protected or entry.size):
            on_host = entry if self._is_host or name == "host" else self._copy(entry, "host")
            self.files.put(*entry.tokens, on_host.state)

    def _archive_nbytes_of(self, entry: CachedPrefix) -> int:
        return self._executor.facts.archive_nbytes(entry.length)

    def _archive_fits(self, entry: CachedPrefix, others: int = 0) -> bool:
        return others + self._archive_nbytes_of(entry) <= self._most_archived

    def _copy(self, entry: CachedPrefix, place: Place) -> CachedPrefix:
        """A copy in the other memory. A GPU copies asynchronously, and the host does not wait for it."""
        return entry._replace(state=self._executor.copy(entry.state, place, wait=False))

    def _add(self, name: Place, key: _Key, entry: CachedPrefix) -> None:
        self._tiers[name][key] = entry
        self._bytes[name] += entry.nbytes
        self.archive_nbytes += self._archive_nbytes_of(entry)
        insort(self._sorted, entry.tokens)

    def _pop(self, name: Place, key: _Key) -> CachedPrefix | None:
        entry = self._tiers[name].pop(key, None)
        if entry is not None:
            self._bytes[name] -= entry.nbytes
            self.archive_nbytes -= self._archive_nbytes_of(entry)
            del self._sorted[bisect_left(self._sorted, entry.tokens)]
        return entry


def _tokens(owner: str, ids: Sequence[int]) -> Tokens:
    return Tokens(owner, array("i", ids))


def _hashes(tokens: Tokens) -> list[int]:
    """A hash of each prefix, from one token on. The tokens are compared as well: two prefixes may have one hash."""
    found, last = [], hash(tokens.owner)
    for token in tokens.ids:
        last = hash((last, token))
        found.append(last)
    return found


def _common_length(one: array[int], other: array[int]) -> int:
    """The length of the common prefix, less than that of `one`; by bisection, since slices compare fast."""
    low, high = 0, min(len(one) - 1, len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
