"""A tiny random model, and chunks of two kinds of text for it."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.training.plan import TrainingPlan
from tests.helpers.tiny import VOCABULARY, build, llama

LENGTH, AHEAD = 256, 64


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return build(llama())


@pytest.fixture(scope="session")
def plan() -> TrainingPlan:
    return TrainingPlan(sizes=(24, 40), ahead=AHEAD, length=LENGTH, chunks=6, held_out=2, moments=3, hidden=4, steps=60)


@pytest.fixture(scope="session")
def texts() -> dict[str, list[list[int]]]:
    """Token ids: one kind repeats few tokens, the other has all of them."""
    draw = torch.Generator().manual_seed(0)
    return {
        kind: [torch.randint(3, most, (LENGTH + 9,), generator=draw).tolist() for _ in range(6)]
        for kind, most in (("few", 12), ("many", VOCABULARY))
    }
