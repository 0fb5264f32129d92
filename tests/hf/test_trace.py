from __future__ import annotations

from typing import Any

import pytest
import torch

import msrnn
from msrnn.errors import UsageError
from msrnn.policy import Policy
from tests.helpers.tiny import FAMILIES, build, left_padded, llama, tokens


def test_a_window_is_a_diagonal() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "window+1", 4, chunk=5)
    trace = msrnn.trace(rnn, tokens(1, 12))
    assert trace.evicted_at.shape == (1, 2, 1, 12)
    assert trace.layers == (0, 1)
    assert trace.evicted_at[0, 0, 0].tolist() == [12, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12, 12]
    assert trace.seen_at(5)[0, 0, 0].nonzero()[:, 0].tolist() == [0, 2, 3, 4, 5]


def test_times_are_by_input_column() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 5, chunk=4)
    ids, mask = left_padded(tokens(2, 20), [0, 6])
    together = msrnn.trace(rnn, ids, mask).evicted_at
    alone = msrnn.trace(rnn, ids[1:, 6:]).evicted_at
    assert (together[1, ..., :6] == -1).all()
    assert torch.equal(together[1, ..., 6:], alone[0] + 6)


def test_what_is_held_is_what_the_state_holds() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "h2o", 6)
    ids = tokens(1, 30)
    state = rnn.state()
    rnn.read(ids, state)
    evicted_at = msrnn.trace(rnn, ids).evicted_at
    assert evicted_at.shape == (1, 2, 2, 30)
    for layer in range(2):
        for group in range(2):
            held = (evicted_at[0, layer, group] == 30).nonzero()[:, 0].tolist()
            assert sorted(set(state.positions(layer)[0, group].tolist()) - {-1}) == held


def test_layers_of_one_group_repeat_it() -> None:
    rnn = msrnn.MultiStateRNN(build(FAMILIES["gemma2"]()), "tova-head", 16)
    evicted_at = msrnn.trace(rnn, tokens(1, 30)).evicted_at
    sliding = evicted_at[0, 0]
    assert torch.equal(sliding[0], sliding[1])
    assert not torch.equal(evicted_at[0, 1, 0], evicted_at[0, 1, 1])


def test_nothing_to_trace_is_said() -> None:
    with pytest.raises(ValueError, match="'full' evicts nothing"):
        msrnn.trace(msrnn.MultiStateRNN(build(llama()), "full", None), tokens(1, 5))


def test_tokens_to_trace_are_rows() -> None:
    with pytest.raises(ValueError, match=r"shape \[5\]"):
        msrnn.trace(msrnn.MultiStateRNN(build(llama()), "tova", 4), tokens(1, 5)[0])


def test_recent_tokens_are_not_evicted() -> None:
    """With equal attention older tokens have larger sums, so the youngest that is not protected is evicted."""
    rnn = msrnn.MultiStateRNN(build(llama()), Policy(decay=1.0, recent=2), 4, chunk=5)
    with torch.no_grad():
        for layer in rnn.model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    trace = msrnn.trace(rnn, tokens(1, 12))
    for layer in range(2):
        assert trace.evicted_at[0, layer, 0].tolist() == [12, 12, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12]


@pytest.mark.parametrize("policy", ["tova", "h2o"])
def test_protected_columns_are_held(policy: str) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), policy, 12)
    ids, mask = left_padded(tokens(2, 40), [0, 4])
    traced = msrnn.trace(rnn, ids, mask, protect=range(6, 9)).evicted_at
    assert (traced[..., 6:9] == 40).all()
    assert (msrnn.trace(rnn, ids, mask).evicted_at[..., 6:9] < 40).any()
    for wrong in (range(6, 41), range(9, 6), range(0, 9, 2), 3):
        with pytest.raises(ValueError, match="protect="):
            msrnn.trace(rnn, ids, mask, protect=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("policy", ["tova", "tova-head"])
def test_recalled_tokens_are_recorded(policy: str, every: int) -> None:
    """Block by block, they are the guests of a state that reads the same; and eviction times are those of its rows."""
    rnn, ids, protect = msrnn.MultiStateRNN(build(llama(4, 2)), policy, 8, recall=3), tokens(1, 23), 3
    counted = list[int]()
    traced = msrnn.trace(rnn, ids, on_block=counted.append, protect=range(protect), recall_every=every)
    assert sum(counted) == 23
    assert traced.recalled is not None
    assert traced.recalled.shape == (len(counted), 2, 23)
    state, begin = rnn.state(), 0
    for block, columns in enumerate(counted):
        part = ids[:, begin : begin + columns]
        inside = torch.tensor([max(0, min(protect - begin, columns))])
        with state.protecting(inside):
            rnn.read(part, state, recall_every=every)
        begin += columns
        for layer, slots in enumerate(state.layers):
            guests = {*slots.guest_position.flatten().tolist()} - {-1}
            assert {*traced.recalled[block, layer].nonzero().flatten().tolist()} == guests
            held = [{*row.tolist()} - {-1} for row in slots.position[0]]
            seen = [{*row[:begin].gt(begin - 1).nonzero().flatten().tolist()} for row in traced.evicted_at[0, layer]]
            assert seen == held
    assert traced.recalled.any()
    assert msrnn.trace(rnn, ids).recalled is None
    without = msrnn.trace(rnn, ids, protect=range(protect))
    assert not torch.equal(without.evicted_at, traced.evicted_at)


def test_what_recall_cannot_trace_is_refused() -> None:
    plain, rnn = (msrnn.MultiStateRNN(build(llama()), "tova", 8, recall=rows) for rows in (0, 3))
    wrong: list[tuple[msrnn.MultiStateRNN, Any, Any, str]] = [
        (plain, tokens(1, 9), {"recall_every": 1}, "archives nothing"),
        (rnn, tokens(2, 9), {"recall_every": 1}, "one text without padding"),
        (rnn, tokens(1, 9), {"recall_every": 0}, "recall_every=0"),
        (rnn, tokens(1, 9), {"recall_every": 4, "protect": range(3, 5)}, "begin at a multiple of 4"),
        (rnn, tokens(1, 9), {"recall_every": 4, "protect": range(8)}, "8 tokens: 7 fit"),
    ]
    for made, ids, options, message in wrong:
        with pytest.raises(UsageError, match=message):
            msrnn.trace(made, ids, **options)
