"""Read all chunks at one size and keep their decisions in files, so that an interrupted training reads none twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.evaluation.runner import Progress
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import Policy
from msrnn.training.collect import Stack, collect_decisions
from msrnn.training.decisions import Decisions, join, load_decisions, save_decisions
from msrnn.training.plan import TrainingPlan
from msrnn.training.work import WorkFolder

TOGETHER = 16  # chunks that are read at once
_CPU = torch.device("cpu")


class Stage(NamedTuple):
    """What is done now, as progress shows it."""

    label: str


class DecisionReader:
    """Reads chunks with a model whose layers in `stacks` are trained."""

    def __init__(
        self,
        model: PreTrainedModel,
        stacks: Sequence[Stack],
        plan: TrainingPlan,
        work: WorkFolder,
        told: Progress,
    ) -> None:
        self.model, self.stacks, self.plan, self.work, self.told = model, stacks, plan, work, told

    def read(self, policy: str | Policy, size: int, chunks: Tensor, name: str, label: str) -> list[Decisions]:
        """The decisions [chunks * moments, ...] of each stack, on the CPU.

        `name` is that of the files, of which each has a part of the chunks; `label` is for progress.
        """
        rnn: MultiStateRNN | None = None
        parts = []
        for number, part in enumerate(chunks.split(TOGETHER)):
            file = self.work.file(f"{name}-{size}-{number}.safetensors")
            moments = self.draw_moments(size, number)
            found = load_decisions(file)
            if found is None:
                if rnn is None:
                    self.told.cell(Stage(f"{label}, size {size:,}, reading"))
                    rnn = MultiStateRNN(self.model, policy, size)
                found = collect_decisions(rnn, self.stacks, part, moments, self.plan.ahead, self.told.tokens)
                found = [stack.to(_CPU) for stack in found]
                save_decisions(file, found)
            else:
                self.told.tokens(len(part) * (moments[-1] + self.plan.ahead))
            parts.append(found)
        return join(parts)

    def draw_moments(self, size: int, number: int) -> list[int]:
        """The moments of a part of the chunks, which are read together."""
        possible = self.plan.moments_of(size)
        draw = torch.Generator().manual_seed((self.plan.seed << 20) + (number << 4))
        order = torch.randperm(len(possible), generator=draw)[: self.plan.moments]
        return sorted(possible[i] for i in order.tolist())

    def count_tokens(self, chunks: Tensor) -> int:
        """Tokens to read, at all sizes: each part to the end of its last moment's future."""
        return sum(
            len(part) * (self.draw_moments(size, number)[-1] + self.plan.ahead)
            for size in self.plan.sizes
            for number, part in enumerate(chunks.split(TOGETHER))
        )

    def count_bytes(self, chunks: Tensor) -> int:
        """Bytes of the decisions at all sizes, at most."""
        row = sum(
            len(stack.layers) * stack.shape.kv_heads * (4 * (stack.shape.key_dim + stack.shape.value_dim) + 12)
            for stack in self.stacks
        )
        candidates = (
            min(self.plan.moments, len(self.plan.moments_of(size))) * self.plan.count_candidates(size)
            for size in self.plan.sizes
        )
        return len(chunks) * sum(candidates) * row
