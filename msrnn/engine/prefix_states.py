"""States that are kept after the tokens they have read: a prompt that begins with these reads only the rest."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msrnn.engine.executor import Executor, Place, StateHandle
from msrnn.engine.prefix_files import PrefixFiles


class Tokens(NamedTuple):
    """Tokens that a request has sent. Owners, such as API keys, do not share states."""

    owner: str
    ids: array[int]

    def first(self, length: int) -> Tokens:
        return Tokens(self.owner, self.ids[:length])


class Kept(NamedTuple):
    """The state of one sequence after exactly these tokens."""

    tokens: Tokens
    state: StateHandle

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.length * self.tokens.ids.itemsize

    @property
    def length(self) -> int:
        return len(self.tokens.ids)


class PrefixStates:
    """Kept states, in bounded memory: on the model's device first, then on the host. The least recently used one goes.

    On a CPU, both amounts of memory are one. With `files`, states that leave memory are written; their logits are not,
    so a prompt that is the whole of what such a state has read is read from an earlier one on. `ends`: whether states
    after whole prompts and answers are kept, too.
    """

    def __init__(
        self,
        executor: Executor,
        device_bytes: int,
        host_bytes: int,
        files: PrefixFiles | None = None,
        ends: bool = True,
    ) -> None:
        self._executor, self.files, self._ends = executor, files, ends
        self._is_host = executor.facts.device == "cpu"
        if self._is_host:
            device_bytes, host_bytes = device_bytes + host_bytes, 0
        self._most: dict[Place, int] = {"device": device_bytes, "host": host_bytes}
        self._tiers: dict[Place, OrderedDict[tuple[int, int], Kept]] = {"device": OrderedDict(), "host": OrderedDict()}
        self._bytes: dict[Place, int] = {"device": 0, "host": 0}
        self._sorted: list[Tokens] = []  # of all of them
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

    def put(self, ids: Sequence[int], state: StateHandle, owner: str = "") -> None:
        """Keep the state of one sequence, which nobody may change from now on."""
        tokens = _tokens(owner, ids)
        key, kept = (len(ids), _hashes(tokens)[-1]), Kept(tokens, state)
        self._pop("host", key)
        before = self._pop("device", key)
        if before is not None and before.tokens == tokens and before.state.has_logits and not state.has_logits:
            kept = before  # the same state, which serves a whole prompt as well
        if kept.nbytes <= self._most["device"]:
            self._add("device", key, kept)
        else:
            self._push_out(key, kept)
        self._make_room()

    def longest(self, prompt: Sequence[int], owner: str = "") -> Kept | None:
        """The kept state of the longest prefix, on the model's device; one of the whole prompt must have its logits."""
        kept = self._longest_in_memory(_tokens(owner, prompt))
        if self.files is not None and (found := self.files.longest(owner, prompt, kept.length if kept else 0)):
            ids, state = found
            kept = Kept(_tokens(owner, ids), state)
            self.put(ids, state, owner=owner)
        if kept is None:
            self.misses += 1
        else:
            self.hits += 1
        return kept

    def _longest_in_memory(self, prompt: Tokens) -> Kept | None:
        """The state that is kept; those of shorter prefixes count as used, too: later prompts may share only these."""
        hashes = _hashes(prompt)
        lengths = {length for tier in self._tiers.values() for length, _ in tier if length <= len(prompt.ids)}
        found: list[tuple[Place, tuple[int, int]]] = []
        for length in sorted(lengths, reverse=True):
            key = length, hashes[length - 1]
            for name, tier in self._tiers.items():
                kept = tier.get(key)
                if kept is None or kept.tokens != prompt.first(length):
                    continue
                if length == len(prompt.ids) and not kept.state.has_logits:
                    continue
                found.append((name, key))
        if not found:
            return None
        used = self._used(*found[0])
        for name, key in found[1:]:
            if key in self._tiers[name]:
                self._tiers[name].move_to_end(key)
        return used

    def shared_lengths(self, prompt: Sequence[int], others: Iterable[Sequence[int]], owner: str = "") -> list[int]:
        """How many tokens the prompt shares with others of its owner, and at most with a kept state.

        In order, and never all of them.
        """
        tokens = _tokens(owner, prompt)
        place = bisect_left(self._sorted, tokens)
        near = self._sorted[max(0, place - 1) : place + 1]  # no other one has more in common with it
        known = [other.ids for other in near if other.owner == owner]
        return sorted({_shared(tokens.ids, array("i", other)) for other in [*known, *others]})

    def _used(self, name: Place, key: tuple[int, int]) -> Kept:
        """The entry, now the most recently used; one on the host comes back to the device, if it fits there."""
        kept = self._pop(name, key)
        assert kept is not None
        on_device = self._copy(kept, "device") if name == "host" else kept
        if kept.nbytes <= self._most["device"]:
            self._add("device", key, on_device)
        else:
            self._add("host", key, kept)
        self._make_room()
        return on_device

    def _make_room(self) -> None:
        """Move states from the device to the host, and from the host to files, until the rest fits."""
        for name, tier in self._tiers.items():
            while self._bytes[name] > self._most[name]:
                key = next(iter(tier))
                kept = self._pop(name, key)
                assert kept is not None
                self._push_out(key, kept, full=name == "host")

    def _push_out(self, key: tuple[int, int], kept: Kept, full: bool = False) -> None:
        """A state for which the device has no room goes to the host, or to a file if that is full or too small."""
        if not full and kept.nbytes <= self._most["host"]:
            self._add("host", key, self._copy(kept, "host"))
        elif self.files is not None:
            on_host = kept if self._is_host or full else self._copy(kept, "host")
            self.files.put(*kept.tokens, on_host.state)

    def _copy(self, kept: Kept, place: Place) -> Kept:
        """A copy in the other memory, which a GPU makes among its other work: nobody waits for it."""
        return kept._replace(state=self._executor.copy(kept.state, place, wait=False))

    def _add(self, name: Place, key: tuple[int, int], kept: Kept) -> None:
        self._tiers[name][key] = kept
        self._bytes[name] += kept.nbytes
        insort(self._sorted, kept.tokens)

    def _pop(self, name: Place, key: tuple[int, int]) -> Kept | None:
        kept = self._tiers[name].pop(key, None)
        if kept is not None:
            self._bytes[name] -= kept.nbytes
            del self._sorted[bisect_left(self._sorted, kept.tokens)]
        return kept


def _tokens(owner: str, ids: Sequence[int]) -> Tokens:
    return Tokens(owner, array("i", ids))


def _hashes(tokens: Tokens) -> list[int]:
    """A hash of each prefix, from one token on. The tokens are compared as well: two prefixes may have one hash."""
    found, last = [], hash(tokens.owner)
    for token in tokens.ids:
        last = hash((last, token))
        found.append(last)
    return found


def _shared(one: array[int], other: array[int]) -> int:
    """The length of the common prefix, less than that of `one`; by bisection, since slices compare fast."""
    low, high = 0, min(len(one) - 1, len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
