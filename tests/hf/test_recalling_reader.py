"""Tokens that recall, read together and one by one: `test_recall.py` has what they find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import msrnn
from msrnn.hf.recalling_reader import TOGETHER
from tests.helpers.tiny import build, llama

LENGTH = 40


def read_both_ways(device: str, tokens: int, every: int, last_only: bool) -> tuple[Tensor, Tensor, list[Any]]:
    """The logits of tokens that are read by one call and by several, and their states."""
    rnn = msrnn.MultiStateRNN(build(llama(4, 2)).to(device), "tova", 12, recall=6)
    ids = torch.randint(0, 50, (1, LENGTH + tokens), generator=torch.Generator().manual_seed(0)).to(device)
    states = [rnn.state() for _ in range(2)]
    for state in states:
        rnn.read(ids[:, :LENGTH], state)
    text = ids[:, LENGTH:]
    together = rnn.read(text, states[0], last_only=last_only, recall_every=every)
    apart = torch.cat([rnn.read(part, states[1], recall_every=every) for part in text.split(every, 1)], 1)
    return together, apart[:, -1:] if last_only else apart, states


@pytest.mark.parametrize("tokens", [1, 3, TOGETHER, TOGETHER + 5])
@pytest.mark.parametrize("last_only", [False, True])
def test_tokens_read_together_recall_each_for_itself(tokens: int, last_only: bool, device: str) -> None:
    together, apart, states = read_both_ways(device, tokens, 1, last_only)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    for layers in zip(*(state.layers for state in states), strict=True):
        guests, others = ({*layer.guest_position.flatten().tolist()} for layer in layers)
        assert guests == others
        assert guests != {-1}
    assert states[0].seen.tolist() == states[1].seen.tolist() == [LENGTH + tokens]


def test_blocks_read_together_recall_each_for_itself(device: str) -> None:
    together, apart, _ = read_both_ways(device, 19, 8, last_only=False)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
