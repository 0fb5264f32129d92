"""An executor without torch and without a model: the next token is a function of all tokens that a state has read.

So an answer is right only if its slot has read exactly its own tokens, once each and in order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy

from msrnn.engine.executor import (
    FAILED,
    Executor,
    Facts,
    Place,
    SampledTokens,
    Sampler,
    SamplerSpec,
    StateHandle,
    WarmUp,
)
from msrnn.engine.requests import Logprobs, SamplingParams
from msrnn.engine.retention import Retention
from msrnn.errors import UsageError
from msrnn.recall import Recalling

VOCABULARY, STOP = 97, 1
BYTES = 1000  # of a state
PROTECTED = 1000  # is added to a token that is protected, so that answers depend on what is
SIZED = 10_000  # times the size of a state that has one of its own, is added to its first token


def next_token(tokens: Sequence[int]) -> int:
    """From 2 on: no stop token follows by itself."""
    return 2 + sum(place * token for place, token in enumerate(tokens, 3)) % (VOCABULARY - 2)


def answer_to(tokens: Sequence[int], length: int) -> list[int]:
    """The answer to everything that was read before it."""
    found: list[int] = []
    for _ in range(length):
        found.append(next_token([*tokens, *found]))
    return found


@dataclass(eq=False)
class FakeState:
    tokens: list[int] = field(default_factory=list)
    place: Place = "device"
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    has_logits: bool = False
    size: int | None = None

    @property
    def known(self) -> list[int]:
        """What the next token is a function of."""
        return [token + SIZED * (self.size or 0) * (place == 0) for place, token in enumerate(self.tokens)]

    @property
    def seen(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return BYTES

    @property
    def archive_nbytes(self) -> int:
        return 0

    def copy(self, **changes: Any) -> FakeState:
        return replace(self, tokens=[*self.tokens], **changes)


@dataclass
class FakeSampler:
    params: SamplingParams
    broken: bool
    stops: Collection[int]

    def choose(self, tokens: Sequence[int]) -> int:
        return FAILED if self.broken else next_token(tokens)


@dataclass
class FakeTokens:
    tokens: list[int]
    wanted: list[int | None]

    def on_host(self) -> tuple[list[int], dict[int, Logprobs]]:
        pairs = enumerate(zip(self.tokens, self.wanted, strict=True))
        return self.tokens, {i: Logprobs(0.0, [(token, 0.0)][:most]) for i, (token, most) in pairs if most is not None}


class FakeExecutor(Executor):
    """Refuses what the contract of an executor does not allow.

    calls   what was asked for, in order: ("read", tokens), ("put", slots), ("step", slots) and ("verify", guesses)
    groups  lengths of what was read at once, in order
    broken  first tokens of prompts whose answers cannot be sampled
    """

    def __init__(
        self,
        slots: int = 4,
        overlaps: bool = False,
        device: str = "cpu",
        rows: int | None = None,
        together: int = 1,
        **fingerprint: Any,
    ) -> None:
        made = {"policy": "all", "positions": "original", **fingerprint}
        shared = slots, BYTES, device, overlaps, VOCABULARY, "a model", made, [rows], rows or 0
        self.facts = Facts(*shared, takes_back=True, together=together)
        self.slots: list[FakeState | None] = [None] * slots
        self.next = [0] * slots
        self.calls: list[tuple[str, int]] = []
        self.groups: list[list[int]] = []
        self.broken: set[int] = set()
        self.longest = 2**31
        self.protectable = 2**31
        self.closed = False

    def check_length(self, tokens: int) -> None:
        if tokens > self.longest:
            raise UsageError(f"{tokens} tokens: at most {self.longest}")

    def stop_tokens(self, tokenizer: Any) -> frozenset[int]:
        return frozenset({STOP})

    def plan_warm_up(self, prompt_tokens: int, guesses: int = 0) -> list[WarmUp]:
        return [WarmUp("prompt", prompt_tokens), WarmUp("step", 1), WarmUp("guesses", 1 + guesses)]

    def warm_up(self, part: WarmUp) -> None:
        self.calls.append((part.what, part.number))

    def close(self) -> None:
        self.closed = True

    def new_state(self, size: int | None = None) -> FakeState:
        return FakeState(fingerprint=self.facts.fingerprint, size=size)

    def check_size(self, size: int) -> None:
        if not 0 < size <= self.facts.mean_size:
            raise UsageError(f"from 1 to {self.facts.mean_size}", name="size", value=size)

    def check_protect(self, tokens: int, state: StateHandle | None = None, size: int | None = None) -> None:
        held = 0 if state is None else sum(token >= PROTECTED for token in fake(state).tokens)
        if held + tokens > self.protectable:
            raise UsageError(f"protect: {tokens} tokens, {self.protectable - held} fit")

    def release(self, state: StateHandle) -> None:
        mine = self._own(state)
        mine.tokens = [token % PROTECTED for token in mine.tokens]

    def read(
        self,
        state: StateHandle,
        tokens: Sequence[int],
        logprobs: int | None = None,
        protect: bool = False,
        recalling: Recalling | None = None,
    ) -> list[Logprobs | None]:
        mine = self._own(state)
        assert tokens
        assert recalling is None or self.facts.recall is not None
        self.calls.append(("read", len(tokens)))
        known = [mine.has_logits or place > 0 for place in range(len(tokens))]
        mine.tokens += [token + PROTECTED for token in tokens] if protect else tokens
        mine.has_logits = True
        if logprobs is None:
            return []
        return [Logprobs(-1.0, []) if before else None for before in known]

    def read_together(self, states: Sequence[StateHandle], tokens: Sequence[Sequence[int]]) -> None:
        assert 1 < len({id(state) for state in states}) == len(states) <= self.facts.together
        self.groups.append([*map(len, tokens)])
        super().read_together(states, tokens)

    def copy(self, state: StateHandle, place: Place, wait: bool = True) -> FakeState:
        return fake(state).copy(place=place)

    def convert(self, state: StateHandle) -> FakeState:
        return fake(state).copy(fingerprint=self.facts.fingerprint, has_logits=False)

    def save(self, state: StateHandle, path: Path, notes: Mapping[str, Any]) -> None:
        mine = fake(state)
        about = {**mine.fingerprint, "columns": [mine.seen], "notes": notes, "tokens": mine.tokens}
        about["size"] = mine.size
        path.write_text(json.dumps(about))

    def load(self, path: Path) -> FakeState:
        found = self.describe(path)
        if any(found.get(name) != value for name, value in self.facts.fingerprint.items()):
            raise UsageError(f"{path}: of another model")
        return FakeState(found["tokens"], "device", self.facts.fingerprint, size=found["size"])

    def describe(self, path: Path) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"{path}: damaged") from error
        return found

    def retention(self, state: StateHandle) -> Retention:
        seen = state.seen
        return Retention(seen, seen, seen, BYTES, BYTES, numpy.arange(seen, dtype=numpy.int32), numpy.ones(seen))

    def slot_retention(self, slot: int) -> Retention:
        return self.retention(self._in(slot))

    def new_sampler(self, state: StateHandle, spec: SamplerSpec) -> Sampler:
        assert state.has_logits
        return FakeSampler(spec.params, spec.prompt[0] in self.broken, spec.stops)

    def put(self, slot: int, state: StateHandle, samplers: Sequence[Sampler]) -> FakeTokens:
        mine = self._own(state)
        assert mine.has_logits
        assert samplers
        self.calls.append(("put", len(samplers)))
        places = range(slot, slot + len(samplers))
        for place in places:
            self.slots[place] = mine.copy()
        return self._sample(places, samplers)

    def step(self, samplers: Sequence[Sampler]) -> FakeTokens:
        assert samplers
        self.calls.append(("step", len(samplers)))
        for place in range(len(samplers)):
            self._in(place).tokens.append(self.next[place])
        return self._sample(range(len(samplers)), samplers)

    def verify(self, sampler: Sampler, guesses: Sequence[int]) -> list[SampledTokens]:
        assert isinstance(sampler, FakeSampler)
        self.calls.append(("verify", len(guesses)))
        mine, before, found = self._in(0), [*self._in(0).tokens], list[SampledTokens]()
        for read, guess in zip([self.next[0], *guesses], [*guesses, None], strict=True):
            mine.tokens.append(read)
            sampled = self._sample(range(1), [sampler])
            found.append(sampled)
            if sampled.tokens != [guess]:
                break
        mine.tokens = [*before, *mine.tokens[len(before) :], *guesses[len(found) - 1 :]]
        return found

    def take_back(self, tokens: int) -> None:
        mine = self._in(0)
        assert 0 <= tokens < len(mine.tokens)
        mine.tokens = mine.tokens[: len(mine.tokens) - tokens]

    def _sample(self, places: range, samplers: Sequence[Sampler]) -> FakeTokens:
        found, wanted = [], []
        for place, sampler in zip(places, samplers, strict=True):
            assert isinstance(sampler, FakeSampler)
            found.append(sampler.choose(self._in(place).known))
            wanted.append(sampler.params.logprobs)
            self.next[place] = max(0, found[-1])
        return FakeTokens(found, wanted)

    def move(self, source: int, target: int) -> None:
        self.slots[target], self.slots[source] = self._in(source), None
        self.next[target] = self.next[source]

    def take(self, slot: int, seen: int) -> FakeState:
        state = self._in(slot)
        assert state.seen == seen
        return state.copy(has_logits=False)

    def free(self, slot: int) -> None:
        self.slots[slot] = None

    def _in(self, slot: int) -> FakeState:
        state = self.slots[slot]
        assert state is not None
        return state

    def _own(self, state: StateHandle) -> FakeState:
        """A state that this executor can compute with."""
        mine = fake(state)
        assert (mine.place, mine.fingerprint) == ("device", self.facts.fingerprint)
        return mine


def fake(state: StateHandle) -> FakeState:
    assert isinstance(state, FakeState)
    return state
