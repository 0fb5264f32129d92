"""The decode batch: the batch slots of one state. The first slots are in use, so that few answers cost little."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from msrnn.core.device_memory import available_bytes, on_device
from msrnn.core.shards import least
from msrnn.core.slots import Slots
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.draft import Draft
from msrnn.hf.rnn import MultiStateRNN
from msrnn.scored import refuse_scored

MOST_SLOTS = {"cpu": 8, "cuda": 512}  # by default: more of them cost a CPU as much time as they gain


def fitting_slots(rnn: MultiStateRNN, others: float = 0) -> int:
    """As many slots as fit into four fifths of the free memory; on a CPU few, which cost as much time as they gain.

    others  slots of other engines for each of these
    """
    most = MOST_SLOTS.get(rnn.device.type, MOST_SLOTS["cpu"])
    free, one = available_bytes(rnn.device), max(1, rnn.spec.nbytes(1))
    fitting = max(1, most if free is None else min(most, int(free * 4 // 5 // one / (1 + others))))
    return least(fitting, rnn.spec.model.shards, rnn.device)


def bucket_sizes(slots: int) -> list[int]:
    """Batch sizes that a graph is captured for: 1, 2, 3, 4, 6, 8, 12, …, and all slots."""
    sizes = {size for power in range(slots.bit_length()) for size in (1 << power, 3 << power >> 1)}
    return sorted(size for size in sizes | {slots} if 0 < size <= slots)


class DecodeBatch:
    """A state of `slots` sequences that decodes its first ones. It has graphs of its own, captured on views of it."""

    def __init__(self, rnn: MultiStateRNN, slots: int) -> None:
        self.rnn, self.slots = rnn, slots
        self.state = rnn.spec.state(slots)
        for bound in filter(None, rnn.spec.bounds):
            refuse_scored(bound.policy, "the engine cannot have a Python function; use MultiStateRNN.generate")
        if not all(isinstance(layer, Slots) for layer in self.state.layers):
            raise UsageError(
                "the engine needs states of a fixed size in every layer: give a policy and a size, and a model without "
                "linear-attention layers; a size as large as the text is the full model"
            )
        self._graphs = rnn.new_graphs()
        # Numbers of slots that take a step; each has a graph.
        self.buckets: Sequence[int] = bucket_sizes(slots) if self._graphs.possible else range(1, slots + 1)
        self._draft: Draft | None = None  # the last guesses
        self._views: dict[int, MultiState] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}
        self.next = torch.zeros(slots, 1, dtype=torch.long, device=rnn.model.device)  # what each slot reads next
        self._first = self.state.view(slice(1))  # the first slot, where guesses are read

    @torch.no_grad()
    def step(self, count: int) -> Tensor:
        """Let the first `count` slots read their next token -> logits [count, V], which the next step overwrites."""
        bucket = self.buckets[bisect_left(self.buckets, count)]
        view = self._view(bucket)
        ids, mask = self.next[:bucket], self._mask(bucket, count)
        recalling = self.rnn.spec.recalling
        graph = None if recalling and recalling.every > 1 else self._graphs.of(view, recalling=recalling)
        view.prepare_layers(1)
        if graph is None:
            return self.rnn.forward(ids, view, mask, last_only=True, recalling=recalling)[:count, -1]
        return graph(ids, mask)[0][:count, -1]

    @torch.no_grad()
    def read_guesses(self, guesses: Sequence[int]) -> Tensor:
        """Let the first slot read its next token and guesses, which can be taken back -> logits [1 + guesses, V]."""
        draft = self._graphs.draft(self._first, 1 + len(guesses))
        self._draft = draft
        return draft.read(torch.cat([self.next[0], on_device(guesses, self.next.device)])[None])[0]

    def take_back(self, tokens: int) -> None:
        """Take back the last tokens that `read_guesses` has read."""
        assert self._draft is not None
        self._draft.take_back(tokens)

    @torch.no_grad()
    def capture_guesses(self, columns: int) -> None:
        """Capture the CUDA graphs that let the first slot read `columns` tokens and take back wrong guesses among them.

        No slot may be in use.
        """
        self._graphs.draft(self._first, columns)

    def _view(self, count: int) -> MultiState:
        if count not in self._views:
            self._views[count] = self.state.view(slice(count))
        return self._views[count]

    def _mask(self, bucket: int, count: int) -> Tensor | None:
        """Slots that are not in use read padding."""
        if count == bucket:
            return None
        if (bucket, count) not in self._masks:
            self._masks[bucket, count] = (torch.arange(bucket, device=self.next.device) < count).long()[:, None]
        return self._masks[bucket, count]

    def put(self, slot: int, state: MultiState) -> None:
        """Copy a state of one sequence into a slot."""
        self.state.set_sequence(slot, state)

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another, and its next token."""
        self.state.set_sequence(target, self.state, source)
        self.next[target] = self.next[source]

    def take(self, slot: int, seen: int) -> MultiState:
        """A copy of the state in a slot, which has read `seen` tokens."""
        return self.state.copy_sequence(slot, columns=seen)
