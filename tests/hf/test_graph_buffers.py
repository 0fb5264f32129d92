"""Buffers belong to one state at a time: states that take turns keep their own values."""

from __future__ import annotations

import gc

import pytest
import torch

import msrnn
from msrnn.core.state import MultiState
from msrnn.hf.graph_buffers import GraphBuffers
from tests.helpers.tiny import build, llama, tokens


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama()), "tova", 9)


def addresses(state: MultiState) -> list[int]:
    return [tensor.data_ptr() for layer in state.layers for tensor in layer.tensors().values()]


def test_states_take_turns_in_the_buffers(rnn: msrnn.MultiStateRNN) -> None:
    ids = [tokens(2, 30, seed=seed) for seed in (1, 2)]
    alone, states = [rnn.state(2) for _ in ids], [rnn.state(2) for _ in ids]
    buffers, place = GraphBuffers(states[0]), addresses(states[0])
    for start in range(0, 30, 10):
        for one, expected, columns in zip(states, alone, ids, strict=True):
            buffers.assign(one)
            assert (addresses(one), buffers.owner()) == (place, one)
            part = columns[:, start : start + 10]
            assert torch.equal(rnn.read(part, one), rnn.read(part, expected))
    for one, expected in zip(states, alone, strict=True):
        for mine, theirs in zip(one.layers, expected.layers, strict=True):
            for name, tensor in theirs.tensors().items():
                assert torch.equal(getattr(mine, name), tensor)
    assert not {*addresses(states[0])} & {*place}, "the state that had the buffers before got a copy"


def test_buffers_that_no_state_uses_get_an_empty_one(rnn: msrnn.MultiStateRNN) -> None:
    """It has the size of the RNN, whatever the state before it had."""
    ids, state = tokens(1, 20), rnn.state(size=5)
    expected = rnn.read(ids, rnn.state())
    buffers, place = GraphBuffers(state), addresses(state)
    rnn.read(ids, state)
    del state
    gc.collect()
    assert buffers.owner() is None
    new = buffers.empty_state(rnn.spec.fingerprint)
    assert (addresses(new), buffers.owner(), new.seen.tolist(), new.columns) == (place, new, [0], 0)
    assert torch.equal(rnn.read(ids, new), expected)
