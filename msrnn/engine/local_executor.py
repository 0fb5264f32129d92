"""The executor of one process: a `MultiStateRNN`, its decode batch, and sampling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from msrnn.core.device_memory import available_bytes, on_device
from msrnn.core.state import MultiState
from msrnn.core.state_file import load_description
from msrnn.engine.decode_batch import DecodeBatch, fitting_slots
from msrnn.engine.executor import Executor, Facts, Place, SampledTokens, Sampler, SamplerSpec, StateHandle, WarmUp
from msrnn.engine.prompt_groups import longest_together
from msrnn.engine.prompt_logprobs import score_block
from msrnn.engine.requests import Logprobs
from msrnn.engine.retention import Retention
from msrnn.engine.sampling import SequenceSampler, choose, choose_ahead
from msrnn.engine.state_retention import retention_of
from msrnn.hf.cuda_graphs import WORTH_CAPTURING
from msrnn.hf.draft import width_of
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.stop_tokens import stop_tokens_of
from msrnn.recall import Recalling

TOGETHER = 4  # short prompts that a GPU reads at once


@dataclass(eq=False)
class LocalState:
    """A state of one sequence, and the logits [V] after its last token, which are replaced and never changed."""

    state: MultiState
    logits: Tensor | None = None
    copied: torch.cuda.Event | None = None  # of a copy that a GPU makes: when it is there, for the host to read

    @property
    def seen(self) -> int:
        self.wait()
        return int(self.state.seen[0])

    @property
    def nbytes(self) -> int:
        """Bytes of memory without the archive; torch takes a power of two for a tensor of a copy that a GPU makes."""
        tensors = [tensor for layer in self.state.layers for tensor in layer.tensors().values()]
        sizes = [tensor.nbytes for tensor in [*tensors, *([] if self.logits is None else [self.logits])]]
        if self.copied is not None:
            sizes = [1 << max(0, size - 1).bit_length() for size in sizes]
        return int(sum(sizes))

    @property
    def archive_nbytes(self) -> int:
        self.wait()
        return self.state.archive_nbytes

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.state.fingerprint

    @property
    def has_logits(self) -> bool:
        return self.logits is not None

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class LocalExecutor(Executor):
    """Computes with an RNN in this process.

    slots   of the decode batch; by default as many as fit, 8 on a CPU
    others  slots of other executors for each of these, when `slots` is computed from the free memory
    together  prompts that are read at once; by default 4 where kernels run as CUDA graphs and a quarter of the free
              memory has room for their states, else one by one
    """

    def __init__(
        self, rnn: MultiStateRNN, slots: int | None = None, others: float = 0, together: int | None = None
    ) -> None:
        self.rnn, self.batch = rnn, DecodeBatch(rnn, slots or fitting_slots(rnn, others))
        embeddings: Any = rnn.model.get_input_embeddings()
        self.facts = Facts(
            slots=self.batch.slots,
            slot_nbytes=self.batch.state.nbytes // self.batch.slots,
            device=rnn.device.type,
            overlaps=self.batch.next.is_cuda,
            vocabulary=embeddings.num_embeddings,
            model=rnn.model,
            fingerprint=rnn.spec.fingerprint,
            sizes=rnn.spec.sizes,
            mean_size=rnn.spec.mean_size,
            recall=rnn.prompt_recall,
            archived_row_nbytes=rnn.spec.archived_row_nbytes,
            index_row_nbytes=rnn.spec.index_row_nbytes,
            archived_tokens=rnn.spec.archived_tokens,
            takes_back=rnn.spec.recall is None,
            together=self._count_together(together),
        )
        # The states of prompts that are read at once; kept, since graphs are captured on it.
        self._several = rnn.state(self.facts.together) if self.facts.together > 1 else None

    def __repr__(self) -> str:
        return f"LocalExecutor({self.rnn!r}, slots={self.facts.slots})"

    def _count_together(self, given: int | None) -> int:
        spec = self.rnn.spec
        if spec.recall is not None or spec.model.shards is not None:  # each prompt is searched alone; ranks take turns
            return 1
        free = available_bytes(self.rnn.device)
        fits = free is not None and TOGETHER * spec.nbytes(1) <= free // 4
        return given or (TOGETHER if self.rnn.captures and fits else 1)

    def check_length(self, tokens: int) -> None:
        self.rnn.spec.check_gaps(tokens)
        if self.rnn.spec.model.last_position is not None:
            self.rnn.spec.check_position(tokens - 1)

    def stop_tokens(self, tokenizer: Any) -> frozenset[int]:
        return frozenset(stop_tokens_of(self.rnn.model, tokenizer))

    def plan_warm_up(self, prompt_tokens: int, guesses: int = 0) -> list[WarmUp]:
        captures, together = self.rnn.captures, self.facts.together
        widths = [1 << power for power in range(4, prompt_tokens.bit_length())] or [1]
        parts = [WarmUp("prompt", width) for width in (widths if captures else widths[:1])]
        if together > 1:
            parts += [
                WarmUp("prompts", width) for width in widths if width <= longest_together(prompt_tokens, together)
            ]
        parts += [WarmUp("step", answers) for answers in (self.batch.buckets if captures else [1])]
        if guesses and captures:
            widths = sorted({width_of(columns) for columns in range(1, 2 + guesses)})
            parts += [WarmUp("guesses", width) for width in widths]
        return parts

    @torch.no_grad()
    def warm_up(self, part: WarmUp) -> None:
        if part.what == "step":
            self.batch.step(part.number)
        elif part.what == "guesses":
            self.batch.capture_guesses(part.number)
        else:
            with self.rnn.compiling_rests():
                for _ in range(WORTH_CAPTURING + 1):
                    self._read_zeros(part)

    def _read_zeros(self, part: WarmUp) -> None:
        zeros = [0] * part.number
        if part.what == "prompt":
            self.rnn.read_prompt(on_device(zeros, self.rnn.device)[None], self.rnn.state(), None)
        else:
            several = self.facts.together
            self.read_together([self.new_state() for _ in range(several)], [zeros] * several)

    def close(self) -> None:
        pass

    def new_state(self, size: int | None = None) -> LocalState:
        return LocalState(self.rnn.state(size=size))

    def read(
        self,
        state: StateHandle,
        tokens: Sequence[int],
        logprobs: int | None = None,
        protect: bool = False,
        recalling: Recalling | None = None,
    ) -> list[Logprobs | None]:
        before = local(state).logits
        logits = self.read_logits(state, tokens, logprobs is None, protect, recalling)
        return [] if logprobs is None else score_block(logits, before, tokens, logprobs)

    @torch.no_grad()
    def read_together(self, states: Sequence[StateHandle], tokens: Sequence[Sequence[int]]) -> None:
        several, mine, width = self._several, [local(state) for state in states], max(map(len, tokens))
        assert several is not None
        ends = (one.state.columns + len(part) for one, part in zip(mine, tokens, strict=True))
        several.gather([one.state for one in mine], max(0, max(ends) - width))  # padding reaches no limit
        missing = [[0] * width] * (several.batch_size - len(mine))  # rows that read padding only
        ids = torch.tensor([[0] * (width - len(part)) + [*part] for part in tokens] + missing)
        mask = torch.tensor([[0] * (width - len(part)) + [1] * len(part) for part in tokens] + missing)
        logits = self.rnn.read(ids, several, mask, last_only=True)
        for row, (one, part) in enumerate(zip(mine, tokens, strict=True)):
            with one.state.reading(len(part)):
                one.state.set_sequence(0, several, row)
            one.logits = logits[row, -1].clone()

    def check_size(self, size: int) -> None:
        self.rnn.spec.check_size(size)

    def check_protect(self, tokens: int, state: StateHandle | None = None, size: int | None = None) -> None:
        if state is None:
            self.rnn.spec.check_protect(tokens, size)
        else:
            local(state).state.find_ranges(torch.tensor([tokens]))

    def release(self, state: StateHandle) -> None:
        local(state).state.release()

    def read_logits(
        self,
        state: StateHandle,
        tokens: Sequence[int],
        last_only: bool,
        protect: bool = False,
        recalling: Recalling | None = None,
    ) -> Tensor:
        """Read tokens into a state -> logits [T, V], or the last [1, V]."""
        mine = local(state)
        ids = on_device(tokens, self.rnn.device)[None]
        if recalling is not None and not recalling.starts:  # the end of an answer
            logits = torch.cat([self.rnn.step(token, mine.state) for token in ids.split(1, 1)], 1)[0]
        else:
            every = None if recalling is None else recalling.every
            logits = self.rnn.read(ids, mine.state, last_only=last_only, protect=protect, recall_every=every)[0]
        mine.logits = logits[-1].clone()
        return logits

    def copy(self, state: StateHandle, place: Place, wait: bool = True) -> LocalState:
        mine = local(state)
        device = self.rnn.device if place == "device" else torch.device("cpu")
        logits = None if mine.logits is None else mine.logits.to(device, non_blocking=not wait)
        copy = LocalState(mine.state.to(device, non_blocking=not wait), logits)
        if not wait and mine.state.device.type == "cuda" and device.type == "cpu":
            copy.copied = torch.cuda.Event()
            copy.copied.record(torch.cuda.current_stream(mine.state.device))
        return copy

    def convert(self, state: StateHandle) -> LocalState:
        mine = local(state)
        if mine.fingerprint == self.facts.fingerprint:
            return mine
        return LocalState(self.rnn.convert_state(mine.state))

    def save(self, state: StateHandle, path: Path, notes: Mapping[str, Any]) -> None:
        mine = local(state)
        mine.wait()
        mine.state.save(path, dict(notes), segments_apart=True)

    def load(self, path: Path) -> LocalState:
        return LocalState(self.rnn.load_state(path))

    def describe(self, path: Path) -> dict[str, Any]:
        return load_description(path)

    def retention(self, state: StateHandle) -> Retention:
        mine = local(state)
        mine.wait()
        return retention_of(mine.state)

    def slot_retention(self, slot: int) -> Retention:
        return retention_of(self.batch.state, slot)

    @torch.no_grad()
    def new_sampler(self, state: StateHandle, spec: SamplerSpec) -> SequenceSampler:
        logits = require_logits(state)
        return SequenceSampler(spec, logits.shape[-1], logits.device)

    def put(self, slot: int, state: StateHandle, samplers: Sequence[Sampler]) -> SampledTokens:
        for i in range(len(samplers)):
            self.batch.put(slot + i, local(state).state)
        return self.sample(require_logits(state).expand(len(samplers), -1), samplers, slot)

    def step(self, samplers: Sequence[Sampler]) -> SampledTokens:
        return self.sample(self.batch.step(len(samplers)), samplers, 0)

    @torch.no_grad()
    def verify(self, sampler: Sampler, guesses: Sequence[int]) -> list[SampledTokens]:
        logits, mine, tokens = self.batch.read_guesses(guesses), cast(SequenceSampler, sampler), None
        every: Iterable[SampledTokens] = (self.sample(row[None], [sampler], 0) for row in logits)
        if mine.counts_only:  # all at once, and the host waits only once
            tokens, every = choose_ahead(logits, mine)
        found: list[SampledTokens] = []
        for sampled, guess in zip(every, [*guesses, None], strict=True):
            found.append(sampled)
            if sampled.on_host()[0] != [guess]:
                break
        if tokens is not None:
            mine.number += len(found)
            self.batch.next[0] = tokens[len(found) - 1].clamp(min=0)
        return found

    def take_back(self, tokens: int) -> None:
        self.batch.take_back(tokens)

    @torch.no_grad()
    def sample(self, logits: Tensor, samplers: Sequence[Sampler], slot: int) -> SampledTokens:
        """Sample from logits [B, V], which slots from `slot` on will read next."""
        chosen = choose(logits, cast(Sequence[SequenceSampler], samplers))
        self.batch.next[slot : slot + len(samplers), 0] = chosen.tokens.clamp(min=0)
        return chosen

    def move(self, source: int, target: int) -> None:
        self.batch.move(source, target)

    def take(self, slot: int, seen: int) -> LocalState:
        return LocalState(self.batch.take(slot, seen))

    def free(self, slot: int) -> None:
        if self.facts.recall is not None:
            self.batch.state.clear_archive(slot)


def local(state: StateHandle) -> LocalState:
    """The state behind a handle."""
    if not isinstance(state, LocalState):
        raise TypeError(f"{state!r}: not a state of a LocalExecutor")
    return state


def require_logits(state: StateHandle) -> Tensor:
    """The logits that an answer begins with."""
    logits = local(state).logits
    if logits is None:
        raise ValueError("a state without logits: read a token first")
    return logits
