"""States that are kept after the tokens they have read: a prompt that begins with these reads only the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.core.state import MultiState


class Kept(NamedTuple):
    """A state of one row after exactly these tokens, and the logits [V] after the last, where they are known."""

    tokens: tuple[int, ...]
    state: MultiState
    logits: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + (self.logits.nbytes if self.logits is not None else 0)

    def to(self, device: torch.device) -> Kept:
        """A copy on another device, which the model's device makes among its other work: nobody waits for it."""
        logits = None if self.logits is None else self.logits.to(device, non_blocking=True)
        return Kept(self.tokens, self.state.to(device, non_blocking=True), logits)


class PrefixStates:
    """Kept states, in bounded memory: on the model's device first, then on the host. The least recently used one goes.

    On a CPU, both amounts of memory are one. `ends`: whether states after whole prompts and answers are kept, too.
    """

    def __init__(self, device: torch.device, device_bytes: int, host_bytes: int, ends: bool = True) -> None:
        self._device, self._ends = device, ends
        if device.type == "cpu":
            device_bytes, host_bytes = device_bytes + host_bytes, 0
        self._most = {"device": device_bytes, "host": host_bytes}
        self._tiers: dict[str, OrderedDict[tuple[int, int], Kept]] = {"device": OrderedDict(), "host": OrderedDict()}
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return sum(len(tier) for tier in self._tiers.values())

    @property
    def active(self) -> bool:
        return any(self._most.values())

    @property
    def keeps_ends(self) -> bool:
        return self.active and self._ends

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for tier in self._tiers.values() for kept in tier.values())

    def put(self, tokens: Sequence[int], state: MultiState, logits: Tensor | None = None) -> None:
        """Keep a state of one row, which nobody may change from now on."""
        tokens = tuple(tokens)
        key, kept = (len(tokens), _hashes(tokens)[-1]), Kept(tokens, state, logits)
        self._tiers["host"].pop(key, None)
        before = self._tiers["device"].pop(key, None)
        if before is not None and logits is None and before.tokens == tokens:
            kept = kept._replace(logits=before.logits)
        if kept.nbytes <= self._most["device"]:
            self._tiers["device"][key] = kept
        elif kept.nbytes <= self._most["host"]:
            self._tiers["host"][key] = kept.to(torch.device("cpu"))
        self._make_room()

    def longest(self, prompt: Sequence[int]) -> Kept | None:
        """The kept state of the longest prefix, on the model's device; one of the whole prompt must have its logits.

        Shorter prefixes count as used, too: later prompts may share only these.
        """
        hashes = _hashes(prompt)
        lengths = {length for tier in self._tiers.values() for length, _ in tier if length <= len(prompt)}
        found: list[tuple[str, tuple[int, int]]] = []
        for length in sorted(lengths, reverse=True):
            key = length, hashes[length - 1]
            for name, tier in self._tiers.items():
                kept = tier.get(key)
                if kept is None or kept.tokens != tuple(prompt[:length]):
                    continue
                if length == len(prompt) and kept.logits is None:
                    continue
                found.append((name, key))
        if not found:
            self.misses += 1
            return None
        self.hits += 1
        used = self._used(*found[0])
        for name, key in found[1:]:
            if key in self._tiers[name]:
                self._tiers[name].move_to_end(key)
        return used

    def shared_lengths(self, prompt: Sequence[int], others: Iterable[Sequence[int]]) -> list[int]:
        """How many tokens the prompt shares with kept states and with other prompts, in order; never all of them."""
        known = [kept.tokens for tier in self._tiers.values() for kept in tier.values()]
        return sorted({_shared(prompt, tokens) for tokens in [*known, *others]})

    def _used(self, name: str, key: tuple[int, int]) -> Kept:
        """The entry, now the most recently used; one on the host comes back to the device, if it fits there."""
        kept = self._tiers[name].pop(key)
        on_device = kept.to(self._device) if name == "host" else kept
        if kept.nbytes <= self._most["device"]:
            self._tiers["device"][key] = on_device
        else:
            self._tiers["host"][key] = kept
        self._make_room()
        return on_device

    def _make_room(self) -> None:
        device, host = self._tiers["device"], self._tiers["host"]
        while sum(kept.nbytes for kept in device.values()) > self._most["device"]:
            key, kept = device.popitem(last=False)
            if kept.nbytes <= self._most["host"]:
                host[key] = kept.to(torch.device("cpu"))
        while sum(kept.nbytes for kept in host.values()) > self._most["host"]:
            host.popitem(last=False)


def _hashes(tokens: Sequence[int]) -> list[int]:
    """A hash of each prefix, from one token on. The tokens are compared as well: two prefixes may have one hash."""
    found, last = [], 0
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix, less than that of `one`; by bisection, since slices compare fast."""
    low, high = 0, min(len(one) - 1, len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(one[low:middle]) == tuple(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
