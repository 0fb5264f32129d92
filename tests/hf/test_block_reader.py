"""Texts in blocks: the logits and states are those of the whole text at once."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from tests.helpers.tiny import build, greedy, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def test_last_only_is_the_last_of_all(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9, block=16)
    ids = tokens(2, 37)
    logits = rnn.read(ids, rnn.state(2))
    assert logits.shape == (2, 37, 97)
    last = rnn.read(ids, rnn.state(2), last_only=True)
    assert last.shape == (2, 1, 97)
    torch.testing.assert_close(last, logits[:, -1:])


def test_long_inputs_pass_in_blocks(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9, block=16)
    widths: list[int] = []
    told: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    rnn.read(tokens(1, 40), rnn.state(), on_block=told.append)
    assert widths == told == [16, 16, 8]
    widths.clear()
    rnn.generate(tokens(1, 40), **greedy(max_new_tokens=2))
    hook.remove()
    assert widths == [16, 16, 8, 1]


def test_a_block_is_bounded_by_the_tokens_of_all_rows(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    assert [rnn.block_of(rows) for rows in (1, 32, 33, 448, 10**6)] == [512, 512, 496, 36, 1]
    assert msrnn.MultiStateRNN(model, "tova", 9, block=64).block_of(448) == 64
    read: list[int] = []
    rnn.read(tokens(448, 40), rnn.state(448), last_only=True, on_block=read.append)
    assert read == [36, 4]
