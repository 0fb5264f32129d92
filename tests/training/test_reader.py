from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from msrnn import MultiStateRNN
from msrnn.evaluation.runner import Progress
from msrnn.training import reader
from msrnn.training.collect import find_stacks
from msrnn.training.plan import TrainingPlan
from msrnn.training.reader import DecisionReader
from msrnn.training.work import WorkFolder
from tests.helpers.tiny import tokens


def make(model: PreTrainedModel, plan: TrainingPlan, folder: Path, progress: Progress) -> DecisionReader:
    stacks = find_stacks(MultiStateRNN(model, plan.base, plan.sizes[0]).spec)
    return DecisionReader(model, stacks, plan, WorkFolder(folder / "w.safetensors", {}), progress)


def test_no_chunk_is_read_twice(
    model: PreTrainedModel, plan: TrainingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, counts = tokens(6, plan.length), list[int]()
    made = make(model, plan, tmp_path, Progress(tokens=counts.append))
    first = made.read("echo", 24, chunks, "round-1", "round 1")[0]
    assert first.moments == 6 * plan.moments
    read = sum(counts)

    def fail(*_: Any) -> None:
        pytest.fail("read again")

    monkeypatch.setattr(reader, "collect_decisions", fail)
    second = made.read("echo", 24, chunks, "round-1", "round 1")[0]
    assert all(map(torch.equal, first, second))
    assert (
        sum(counts)
        == 2 * read
        == 2 * make(model, replace(plan, sizes=(24,)), tmp_path, Progress()).count_tokens(chunks)
    )


def test_moments_are_possible_and_repeatable(model: PreTrainedModel, plan: TrainingPlan, tmp_path: Path) -> None:
    made = make(model, plan, tmp_path, Progress())
    drawn = [made.draw_moments(24, part) for part in range(12)]
    assert all(len(set(moments)) == plan.moments for moments in drawn)
    assert all(
        moment % plan.ahead == 0 and plan.ahead <= moment <= plan.length - plan.ahead for ms in drawn for moment in ms
    )
    assert drawn == [made.draw_moments(24, part) for part in range(12)]


def test_bytes_are_those_of_the_tensors_at_most(model: PreTrainedModel, plan: TrainingPlan, tmp_path: Path) -> None:
    made, chunks = make(model, replace(plan, sizes=(24,)), tmp_path, Progress()), tokens(3, plan.length)
    (decisions,) = made.read("echo", 24, chunks, "round-1", "round 1")
    used = sum(tensor.nbytes for tensor in decisions)
    assert used < made.count_bytes(chunks) <= 2 * used + 12 * decisions.change.numel()
