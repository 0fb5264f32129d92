"""States joined (`cat`), moved between devices, and printed."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.errors import UsageError
from tests.helpers.tiny import build, hybrid, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


@pytest.mark.parametrize(("policy", "dtype"), [("tova", None), ("h2o", None), ("echo", "int8"), ("full", None)])
def test_joined_rows_go_on_as_alone(model: PreTrainedModel, policy: str, dtype: str | None) -> None:
    rnn = msrnn.MultiStateRNN(model, policy, 8 if policy != "full" else None, state_dtype=dtype)
    parts = [rnn.state(rows) for rows in (1, 2, 1)]
    for part, length in zip(parts, (5, 100, 20), strict=True):
        rnn.read(tokens(part.batch_size, length, seed=length), part)
    joined = msrnn.MultiState.cat(parts)
    assert joined.seen.tolist() == [5, 100, 100, 20]
    ids = tokens(4, 30, seed=3)
    together = rnn.read(ids, joined)
    start = 0
    for part in parts:
        rows = slice(start, start := start + part.batch_size)
        torch.testing.assert_close(together[rows], rnn.read(ids[rows], part), atol=1e-4, rtol=1e-4)


def test_joining_leaves_the_parts_untouched(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 8)
    one, other = rnn.state(), rnn.state()
    rnn.read(tokens(1, 9), one)
    joined = msrnn.MultiState.cat([one, other])
    rnn.read(tokens(2, 9, seed=2), joined)
    assert (one.seen.tolist(), other.seen.tolist(), joined.seen.tolist()) == ([9], [0], [18, 9])


def test_states_of_two_kinds_do_not_join(model: PreTrainedModel) -> None:
    states = [msrnn.MultiStateRNN(model, "tova", size).state() for size in (8, 9)]
    with pytest.raises(UsageError, match="size 9, and this model has size 8"):
        msrnn.MultiState.cat(states)
    with pytest.raises(UsageError, match="list of states"):
        msrnn.MultiState.cat([])


def test_a_state_on_another_device_is_refused(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 8)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    away = state.to("meta")
    assert (away.device.type, state.device.type, state.seen.tolist()) == ("meta", "cpu", [12])
    with pytest.raises(UsageError, match=r"a state on meta: the model is on cpu; use state\.to"):
        rnn.step(tokens(1, 1), away)
    kept = state.cpu()
    expected = rnn.step(tokens(1, 1), state)
    assert torch.equal(rnn.step(tokens(1, 1), kept), expected)  # a copy, though it was there already


def test_a_state_shows_what_it_is(model: PreTrainedModel) -> None:
    state = msrnn.MultiStateRNN(model, "tova+1", 8).state(2)
    assert repr(state) == f"MultiState(policy='tova+1', size=8, batch_size=2, seen=[0, 0], nbytes={state.nbytes:,})"


def test_linear_attention_states_stay_where_they_are() -> None:
    rnn = msrnn.MultiStateRNN(hybrid(), "tova", 8)
    state = rnn.state()
    rnn.read(tokens(1, 6), state)
    for change in (state.cpu, lambda: msrnn.MultiState.cat([state, state])):
        with pytest.raises(UsageError, match="linear attention"):
            change()
