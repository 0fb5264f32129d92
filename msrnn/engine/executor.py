"""The contract between an engine and what computes for it: states by handles, a decode batch of slots, sampling.

The engine decides what is computed, and in which order; an executor computes it. Tensors stay inside the executor, and
this module does not load torch, so a test can give an engine an executor without a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from msrnn.engine.grammars import Matcher
from msrnn.engine.requests import NOT_FINITE_ERROR, Logprobs, SamplingParams
from msrnn.engine.retention import Retention
from msrnn.errors import UsageError
from msrnn.recall import PromptRecall, Recalling, count_dropped

NOT_FINITE, FAILED, TOO_COMPLEX = -1, -2, -3
NO_TOKEN = {  # numbers that stand for a token where there is none, and why
    NOT_FINITE: NOT_FINITE_ERROR,
    FAILED: "internal error while this token was sampled",
    TOO_COMPLEX: "the constraint cannot be followed any further here: use a simpler one",
}
Place = Literal["device", "host"]  # the memory that a state is in: the model's device, or the host
Sampler = object  # of one answer: its parameters, and the tokens that its penalties count


@dataclass(frozen=True, eq=False)
class SamplerSpec:
    """What the sampler of an answer is made from.

    prompt   the tokens before the answer, and the first ones of it, if it is continued
    stops    the tokens that end it
    matcher  where it begins in the grammar of its constraint
    """

    params: SamplingParams
    seed: int
    prompt: Sequence[int]
    stops: Collection[int] = ()
    matcher: Matcher | None = None


class WarmUp(NamedTuple):
    """A part of a warm-up: kernels for reads or steps of one shape are compiled and captured."""

    what: Literal["prompt", "prompts", "step", "guesses"]  # prompts are read together
    number: int  # tokens of a prompt or of guesses, or answers of a step

    def __str__(self) -> str:
        unit = "answer" if self.what == "step" else "token"
        return f"{self.what} of {self.number:,} {unit}{'s' * (self.number > 1)}"


class StateHandle(Protocol):
    """The state of one sequence, and the logits after its last token where they are known.

    Only an executor of the model it belongs to looks inside.
    """

    @property
    def seen(self) -> int:
        """Tokens read so far."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without the archive."""
        ...

    @property
    def archive_nbytes(self) -> int:
        """Bytes of the archive, wherever it is; 0: there is none. States that share rows count them, each."""
        ...

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The model, policy, size, dtype and positions that the state is of."""
        ...

    @property
    def has_logits(self) -> bool:
        """Whether an answer can begin with this state."""
        ...


class SampledTokens(Protocol):
    """The tokens of one step, maybe still on their way from the device."""

    def on_host(self) -> tuple[list[int], dict[int, Logprobs]]:
        """The token of each answer, or a key of `NO_TOKEN`, and log probabilities by answer, where wanted.

        Waits for this step, and not for what was launched after it.
        """
        ...


@dataclass(frozen=True)
class Facts:
    """The properties of an executor that the engine uses."""

    slots: int  # of the decode batch: answers that are generated at once
    slot_nbytes: int
    device: str  # its type, "cpu" or "cuda"
    overlaps: bool  # whether a step returns before its tokens are known
    vocabulary: int  # token ids are from 0 to this, exclusive
    model: object  # executors with the same one can convert each other's states
    fingerprint: Mapping[str, Any]  # of new states
    sizes: Sequence[int | None]  # KV rows of each layer
    mean_size: int  # of the layers that a budget is divided among
    recall: PromptRecall | None = None  # which tokens of a prompt recall; None: nothing is archived
    archived_row_nbytes: int = 0  # by which the archive of a state grows with each token
    index_row_nbytes: int = 0  # of these, on the device besides: 8-bit copies of keys for searches
    archived_tokens: int | None = None  # the most in an archive, which then drops the oldest; None: all
    takes_back: bool = False  # whether it has `verify` and `take_back`
    together: int = 1  # prompts that `read_together` reads at once

    def count_archived(self, tokens: int) -> int:
        """The tokens in the archive of a state that has read `tokens`, where there is one."""
        return tokens - count_dropped(tokens, self.archived_tokens)

    def archive_nbytes(self, tokens: int) -> int:
        """The bytes of the archive of a state that has read `tokens`."""
        return self.count_archived(tokens) * self.archived_row_nbytes


class Executor(ABC):
    """Computes for an engine.

    One thread at a time may call `read`, `read_together`, `put`, `step`, `move`, `take`, `free`, `slot_retention` and
    `warm_up`. Any thread may copy, save, load, describe and inspect states meanwhile. A `UsageError` or an `OSError`
    concerns one call; after any other error of a read, `put` or `step`, the states of that call and the slots cannot
    be used.
    """

    facts: Facts

    @abstractmethod
    def check_length(self, tokens: int) -> None:
        """Refuse a text of this length with a `UsageError`, if the model or its positions cannot take it."""

    def find_longest(self, most: int) -> int:
        """The length of the longest text that `check_length` takes, `most` or less."""

        def refuses(tokens: int) -> bool:
            try:
                self.check_length(tokens)
            except UsageError:
                return True
            return False

        return bisect_left(range(1, most), True, key=refuses) if refuses(most) else most

    @abstractmethod
    def stop_tokens(self, tokenizer: Any) -> frozenset[int]:
        """The stop tokens of the model, and of a tokenizer or None."""

    @abstractmethod
    def plan_warm_up(self, prompt_tokens: int, guesses: int = 0) -> list[WarmUp]:
        """What to prepare for decode steps, for prefills of up to `prompt_tokens`, and for guesses."""

    @abstractmethod
    def warm_up(self, part: WarmUp) -> None:
        """Compile the kernels and capture the graphs of one part, while no slot is in use."""

    @abstractmethod
    def close(self) -> None:
        """End the other ranks of this executor; a `LocalExecutor` has none."""

    @abstractmethod
    def new_state(self, size: int | None = None) -> StateHandle:
        """An empty state on the device, which holds at most `size` KV rows per layer; None: as many as there are."""

    @abstractmethod
    def check_size(self, size: int) -> None:
        """Refuse with a `UsageError` a size that no state can have."""

    @abstractmethod
    def read(
        self,
        state: StateHandle,
        tokens: Sequence[int],
        logprobs: int | None = None,
        protect: bool = False,
        recalling: Recalling | None = None,
    ) -> list[Logprobs | None]:
        """Read tokens, one or more, into a state on the device, which changes; its logits are known afterwards.

        With `logprobs`, returns the log probability of each of the tokens, and that many of the most likely ones: None
        for a token before which no logits are known. Without, returns nothing. With `protect`, these tokens are not
        evicted until the state is released. `recalling`: how they recall archived rows; None: they do not.
        """

    def read_together(self, states: Sequence[StateHandle], tokens: Sequence[Sequence[int]]) -> None:
        """Read tokens into each of several states, as `read` does; at most `facts.together` of them."""
        for state, part in zip(states, tokens, strict=True):
            self.read(state, part)

    @abstractmethod
    def check_protect(self, tokens: int, state: StateHandle | None = None, size: int | None = None) -> None:
        """Refuse with a `UsageError` to protect more tokens of a state, or of an empty one of a size, than fit."""

    @abstractmethod
    def release(self, state: StateHandle) -> None:
        """Protect no token of a state any more."""

    @abstractmethod
    def copy(self, state: StateHandle, place: Place, wait: bool = True) -> StateHandle:
        """A copy in a place, with the logits. Without `wait`, it may be under way: the executor waits where it must."""

    @abstractmethod
    def convert(self, state: StateHandle) -> StateHandle:
        """A state of another executor of the same model, as a state of this one; its own are returned as they are."""

    @abstractmethod
    def save(self, state: StateHandle, path: Path, notes: Mapping[str, Any]) -> None:
        """Write a state to a file, whole or not at all, without its logits."""

    @abstractmethod
    def load(self, path: Path) -> StateHandle:
        """Read a state that was saved. Raises a `UsageError` if it is damaged, or of another fingerprint."""

    @abstractmethod
    def describe(self, path: Path) -> dict[str, Any]:
        """The description in a state file, unchecked: the fingerprint, `columns` (tokens read) and `notes`."""

    @abstractmethod
    def retention(self, state: StateHandle) -> Retention:
        """The tokens that a state holds."""

    @abstractmethod
    def slot_retention(self, slot: int) -> Retention:
        """The tokens that a batch slot holds."""

    @abstractmethod
    def new_sampler(self, state: StateHandle, spec: SamplerSpec) -> Sampler:
        """The sampler of an answer that begins with a state."""

    @abstractmethod
    def put(self, slot: int, state: StateHandle, samplers: Sequence[Sampler]) -> SampledTokens:
        """Begin answers with a state: copy it into a slot for each sampler, from `slot` on, and sample their tokens."""

    @abstractmethod
    def step(self, samplers: Sequence[Sampler]) -> SampledTokens:
        """Let the first slots, one for each sampler, read the tokens that were sampled for them; sample the next."""

    def verify(self, sampler: Sampler, guesses: Sequence[int]) -> list[SampledTokens]:
        """Let the first slot read the token that was sampled for it, and guesses -> the tokens of the answer.

        They are sampled one after the other, as by `step`, up to the first one that is another than was guessed, or to
        the one after all guesses. The slot has then read all guesses. Only where `facts.takes_back`.
        """
        raise UsageError("this executor cannot take tokens back", advice="make the engine without guesses")

    def take_back(self, tokens: int) -> None:
        """Take back the last tokens that the first slot has read by `verify`."""
        raise UsageError("this executor cannot take tokens back", advice="make the engine without guesses")

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Copy a slot over another one, and its next token."""

    @abstractmethod
    def take(self, slot: int, seen: int) -> StateHandle:
        """A copy of the state in a slot, which has read `seen` tokens, on the device; its logits are not known."""

    @abstractmethod
    def free(self, slot: int) -> None:
        """Free the memory that grows with the text of a slot that is no longer in use: its archive."""
