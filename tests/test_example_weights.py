"""The row weights in examples/: they say how they were trained, and fit the small default model."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

import msrnn
from msrnn.core.weights_file import read_training
from msrnn.hf.loading import Loaded

FOLDER = Path(__file__).parent.parent / "examples/weights"
WEIGHTS = FOLDER / "smollm2-135m-instruct.safetensors"
TEXT, SIZE = 400, 128
LEAST_GAIN = 0.02  # nats per token: half of what was found


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.stem)
def test_they_are_small_and_say_how_they_were_trained(file: Path) -> None:
    assert file.stat().st_size < 10**6
    training = read_training(file)
    assert {"texts", "sizes", "steps", "commit", "lost"} <= training.keys()
    assert "/" not in str(training["model"])


@pytest.mark.small_model
def test_they_predict_a_text_better_than_echo(small: Loaded) -> None:
    text = "\n\n".join(topics[name] for name in ("lambda", "while", "specialnames"))
    ids = small.tokenizer(text, return_tensors="pt").input_ids[:, :TEXT]
    losses = []
    for policy in ("echo", f"echo@{WEIGHTS}"):
        rnn = msrnn.MultiStateRNN(small.model, policy, SIZE)
        logits = rnn.read(ids, rnn.state())
        losses.append(torch.nn.functional.cross_entropy(logits[0, SIZE:-1], ids[0, SIZE + 1 :]).item())
    echo, weights = losses
    assert weights < echo - LEAST_GAIN
