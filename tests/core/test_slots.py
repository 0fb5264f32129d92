from __future__ import annotations

import pytest
import torch

import msrnn
from msrnn.policy import Policy
from tests.helpers.tiny import build, llama, tokens


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama()), Policy(0.5, recent=2), 10, chunk=8)


@pytest.mark.parametrize(
    ("policy", "groups", "bookkeeping"),
    [("tova", 1, 4), ("window+4", 1, 4), ("h2o-layer", 1, 8), ("h2o", 2, 8), ("echo", 1, 12), ("random", 2, 8)],
)
def test_bytes_are_what_the_formula_says_from_the_start(policy: str, groups: int, bookkeeping: int) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), policy, 10)
    layers, kv_heads, dim, batch, slots = 2, 2, 8, 3, 11
    state = rnn.state(batch)
    counters = layers * batch * (8 + 4 * 2 * 4 + 2 * 4)  # tokens read, four protected ranges, an own size
    expected = layers * batch * (2 * kv_heads * slots * dim * 4 + groups * slots * bookkeeping) + counters
    assert state.nbytes == expected
    pointers = [t.data_ptr() for layer in state.layers for t in layer.tensors().values()]
    rnn.read(tokens(batch, 50), state)
    rnn.step(tokens(batch, 1), state)
    assert state.nbytes == expected
    assert pointers == [t.data_ptr() for layer in state.layers for t in layer.tensors().values()], "a buffer moved"


@pytest.mark.parametrize("policy", ["tova", "echo", "h2o"])
def test_slots_in_use_are_those_in_front(policy: str) -> None:
    """However large a state may become, what it holds lies in front, and is written there."""
    rnn = msrnn.MultiStateRNN(build(llama()), policy, 40)
    state = rnn.state(2)
    assert state.layers[0].in_use(3).position.shape[2] == 4
    for n in (7, 1, 2):
        rnn.read(tokens(2, n, seed=n), state)
    for layer in state.layers:
        used = layer.in_use(3)
        assert used.position.shape[2] == used.keys.shape[2] == 14
        assert ((used.position >= 0) == (torch.arange(14) < 10)).all()
        used.position[0, 0, 13] = 99
        assert layer.position[0, 0, 13] == 99
        assert layer.in_use(30) is layer
