"""What the layers of a state hold together: tokens, bytes and positions."""

from __future__ import annotations

import pytest

import msrnn
from msrnn.policy import Policy
from tests.helpers.tiny import build, left_padded, llama, tokens


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama()), Policy(0.5, recent=2), 10, chunk=8)


def test_seen_counts_tokens_and_not_padding(rnn: msrnn.MultiStateRNN) -> None:
    ids, mask = left_padded(tokens(2, 20), [0, 6])
    state = rnn.state(2)
    rnn.read(ids, state, mask)
    assert state.seen.tolist() == [20, 14]
    assert state.positions(0).shape == (2, 1, 11)
    assert state.positions(1)[1].max() == 13


def test_a_new_state_is_empty(rnn: msrnn.MultiStateRNN) -> None:
    state = rnn.state(2)
    assert state.seen.tolist() == [0, 0]
    assert (state.positions(0) == -1).all()


def test_an_unknown_layer_is_named(rnn: msrnn.MultiStateRNN) -> None:
    with pytest.raises(ValueError, match="layer=7"):
        rnn.state().positions(7)
