"""States of other positions, which another RNN continues: their archived keys change with the positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.recall import SEGMENT, Recall
from tests.helpers.tiny import build, llama, tokens

IDS = tokens(1, 70)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(4, 2))


def test_a_converted_state_recalls_as_one_of_these_positions(model: PreTrainedModel) -> None:
    """Before the first eviction there are no gaps, so both have read the same."""
    original = msrnn.MultiStateRNN(model, "tova", 16, recall=6)
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6, positions="compressed")
    begun, whole = original.state(), rnn.state()
    original.read(IDS[:, :10], begun)
    rnn.read(IDS[:, :10], whole)
    found, expected = (rnn.read(IDS[:, 10:], state, recall_every=8) for state in (rnn.convert_state(begun), whole))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_a_converted_archive_is_that_of_the_other_positions(model: PreTrainedModel, state_dtype: str | None) -> None:
    """Keys change their rotation with the positions, there and back; values stay."""
    original, compressed = (
        msrnn.MultiStateRNN(model, "tova", 16, recall=Recall(6, state_dtype=state_dtype), positions=positions)
        for positions in ("original", "compressed")
    )
    begun, whole = original.state(), compressed.state()
    original.read(IDS[:, :12], begun)
    compressed.read(IDS[:, :12], whole)
    there = compressed.convert_state(begun)
    back = original.convert_state(there)
    for found, expected, differs in ((there, whole, begun), (back, begun, there)):
        for mine, theirs, other in zip(found.layers, expected.layers, differs.layers, strict=True):
            rows = [layer.archives[0].gather(torch.arange(12).expand(2, 12)) for layer in (mine, theirs, other)]
            torch.testing.assert_close(rows[0], rows[1], atol=1e-5 if state_dtype is None else 5e-2, rtol=0.0)
            assert not torch.allclose(rows[0][0][:, 1:], rows[2][0][:, 1:], atol=0.2)


@pytest.mark.parametrize("other", [{}, {"search": "int8"}, {"archive": "device"}], ids=str)
def test_a_block_goes_on_with_its_guests(model: PreTrainedModel, other: dict[str, Any]) -> None:
    """The step is inside a block, which recalls at its beginning only."""
    rnn, same = (msrnn.MultiStateRNN(model, "tova", 16, recall=Recall(6, 16, **more)) for more in ({}, other))
    state = rnn.state(2)
    rnn.read(torch.cat([IDS, IDS.flip(1)])[:, :50], state, recall_every=16)
    converted, step = same.convert_state(state), IDS[:, 50:51].expand(2, 1)
    assert bool((state.layers[0].guest_position >= 0).any())
    assert torch.equal(same.step(step, converted), rnn.step(step, state))


def test_guests_are_those_of_the_other_positions() -> None:
    """In one layer, a window holds the same tokens at any positions, and all others are guests."""
    model = build(llama(4, 2, num_hidden_layers=1))
    original, compressed = (
        msrnn.MultiStateRNN(model, "window", 8, recall=24, recall_every=16, positions=positions)
        for positions in ("original", "compressed")
    )
    states = [original.state(), compressed.state()]
    for rnn, state in zip((original, compressed), states, strict=True):
        rnn.read(IDS[:, :30], state, recall_every=16)
        position = state.layers[0].guest_position[0]
        assert [sorted(own[own >= 0].tolist()) for own in position] == [[*range(8)]] * 2
    for rnn, theirs, own in ((compressed, states[0], states[1]), (original, states[1], states[0])):
        found, expected = rnn.convert_state(theirs), own.fork(1)
        torch.testing.assert_close(found.layers[0].guest_keys, expected.layers[0].guest_keys, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(theirs.layers[0].guest_keys, expected.layers[0].guest_keys, atol=0.2)
        one = IDS[:, 30:31]
        torch.testing.assert_close(rnn.step(one, found), rnn.step(one, expected), atol=1e-5, rtol=1e-5)


def test_a_state_that_is_searched_in_another_way_is_converted_first(model: PreTrainedModel) -> None:
    exact, copies = (
        msrnn.MultiStateRNN(model, "tova", 16, recall=Recall(6, search=kind)) for kind in ("exact", "int8")
    )
    state = copies.state()
    copies.read(IDS[:, :50], state)
    with pytest.raises(msrnn.UsageError, match="searched in another way"):
        exact.read(IDS[:, 50:], state, recall_every=1)
    with pytest.raises(msrnn.UsageError, match="convert_state"):
        msrnn.MultiState.cat([exact.state(), state])
    expected = exact.state()
    exact.read(IDS[:, :50], expected)
    for rnn, other in ((exact, state), (copies, expected)):
        layer = rnn.convert_state(other).layers[0]
        keys = next(layer.archives[0].keys_to_search())[1].codes
        assert (keys.dtype == torch.int8) == (rnn is copies)
    found = exact.read(IDS[:, 50:], exact.convert_state(state), recall_every=1)
    assert torch.equal(found, exact.read(IDS[:, 50:], expected, recall_every=1))


def test_a_state_of_another_limit_is_converted_first() -> None:
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = build(llama(2, 2, **small))
    free = msrnn.MultiStateRNN(model, "tova", 16, recall=6)
    limit = 2 * SEGMENT * free.spec.archived_row_nbytes
    limited = msrnn.MultiStateRNN(model, "tova", 16, recall=Recall(6, limit=limit))
    state, short, one = free.state(), limited.state(), IDS[:, :1]
    free.read(tokens(1, 3 * SEGMENT), state)
    limited.read(IDS, short)
    with pytest.raises(msrnn.UsageError, match="archives of this state keep all tokens, and those of this RNN 2,048"):
        limited.read(one, state)
    with pytest.raises(msrnn.UsageError, match="archives of this state keep 2,048 tokens, and those of this RNN all"):
        free.step(one, short)
    with pytest.raises(msrnn.UsageError, match="convert_state"):
        msrnn.MultiState.cat([free.state(), short])
    converted = limited.convert_state(state)
    limited.read(one, converted)
    assert converted.archive_nbytes <= limit < state.archive_nbytes
    assert converted.dropped_tokens == [2 * SEGMENT]
    free.read(one, free.convert_state(short))


def test_an_archive_of_rotated_keys_is_refused(model: PreTrainedModel) -> None:
    """As version 0.1 wrote it, where positions are not original."""
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6, positions="compressed")
    state = rnn.state()
    rnn.read(IDS[:, :30], state)
    fingerprint = {name: value for name, value in state.fingerprint.items() if name != "archived_keys"}
    older = msrnn.MultiState(state.layers, fingerprint, state.columns)
    for use in (lambda: rnn.read(IDS[:, 30:], older), lambda: rnn.convert_state(older)):
        with pytest.raises(msrnn.UsageError, match="archived_keys None"):
            use()
