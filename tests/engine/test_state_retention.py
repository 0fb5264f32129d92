from __future__ import annotations

import torch

import msrnn
from msrnn.engine.state_retention import retention_of
from tests.helpers.tiny import build, llama


def test_a_state_made_by_hand() -> None:
    """Two layers, two KV heads that evict on their own; of two rows, the second one is asked for."""
    rnn = msrnn.MultiStateRNN(build(llama(), "cpu"), msrnn.Policy(decay=0.0, per="head"), 3)
    state = rnn.state(2)
    first, second = state.layers
    first.position[1] = torch.tensor([[0, 7, -1, 5], [-1, 7, 2, 6]], dtype=torch.int32)
    second.position[1] = torch.tensor([[7, 6, 5, -1], [5, 6, 7, -1]], dtype=torch.int32)
    first.seen[1] = second.seen[1] = 8
    found = retention_of(state, 1)
    assert found.list_shares() == [(0, 0.25), (2, 0.25), (5, 0.75), (6, 0.75), (7, 1.0)]
    assert (found.seen, found.slots, found.used) == (8, 12, 12)
    assert found.nbytes == rnn.state(1).nbytes
    assert found.full_nbytes == 8 * 2 * 2 * 2 * 8 * 4  # tokens, layers, KV heads, keys and values, numbers, bytes
    assert retention_of(state, 0).list_shares() == []
    first.position[1, 0] = torch.tensor([8, 7, -1, 5])
    assert retention_of(state, 1).list_shares(found) == [(0, 0.0), (8, 0.25)]


def test_shares_are_rounded_and_windows_count_with_their_own_slots() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(6, 3, num_hidden_layers=1), "cpu"), msrnn.Policy(decay=0.0, per="head"), 2)
    state = rnn.state()
    rnn.read(torch.tensor([[5, 6, 7, 8, 9]]), state)
    found = retention_of(state)
    assert (found.seen, found.slots, found.used) == (5, 6, 6)
    assert {share for _, share in found.list_shares()} <= {0.3333, 0.6667, 1.0}
    assert abs(sum(share for _, share in found.list_shares()) - 2) < 0.001


def test_recalled_tokens() -> None:
    """Two layers of two KV heads; a head that has recalled a token counts with a quarter."""
    rnn = msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 3, recall=2)
    state = rnn.state(2)
    assert retention_of(state, 1).recalled == []
    first, second = state.layers
    first.guest_position[1] = torch.tensor([[4, 9], [4, -1]])
    second.guest_position[1] = torch.tensor([[-1, -1], [0, 4]])
    assert retention_of(state, 1).recalled == [(0, 0.25), (4, 0.75), (9, 0.25)]
    assert retention_of(msrnn.MultiStateRNN(rnn.model, "tova", 3).state()).recalled is None
