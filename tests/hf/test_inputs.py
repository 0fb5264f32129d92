"""Tokens and masks that cannot be read are refused before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.core.slots import MOST_COLUMNS
from tests.helpers.tiny import build, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def read_with(ids: Any, mask: Any = None, rows: int = 1) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 9)
    rnn.read(ids, rnn.state(rows), mask)


@pytest.mark.parametrize(
    ("ids", "error", "named"),
    [
        ([[1, 2]], TypeError, "list"),
        (torch.ones(1, 3), TypeError, "float32"),
        (torch.ones(1, 3, dtype=torch.bool), TypeError, "bool"),
        (torch.ones(3, dtype=torch.long), ValueError, r"\[3\]"),
        (torch.ones(1, 0, dtype=torch.long), ValueError, r"\[1, 0\]"),
        (torch.ones(2, 3, dtype=torch.long), ValueError, "2 sequences do not fit a state of 1"),
        (torch.tensor([[5, 97]]), ValueError, "97"),
        (torch.tensor([[-1, 5]]), ValueError, "-1"),
    ],
)
def test_bad_ids_are_named(ids: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        read_with(ids)


def test_a_mask_must_cover_the_columns() -> None:
    with pytest.raises(ValueError, match=r"\[1, 4\]"):
        read_with(tokens(1, 3), torch.ones(1, 4))


def test_a_row_without_tokens_stays_as_it_is(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "h2o", 9)
    state = rnn.state(2)
    rnn.read(tokens(2, 15), state)
    before = state.positions(1)[1].sort().values
    mask = torch.tensor([[1] * 5, [0] * 5])
    rnn.read(tokens(2, 5), state, mask)
    rnn.read(tokens(2, 1), state, mask[:, :1])
    assert state.seen.tolist() == [21, 15]
    assert torch.equal(state.positions(1)[1].sort().values, before)


def test_tokens_whose_position_does_not_fit_are_refused(model: PreTrainedModel) -> None:
    """Positions are 32 bits wide: beyond them every token would be padding."""
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    state.columns = MOST_COLUMNS - 2
    for layer in state.layers:
        layer.seen.fill_(MOST_COLUMNS - 2)
    rnn.step(tokens(1, 1), state)
    before = state.positions(0)
    assert before.max() == MOST_COLUMNS - 2
    with pytest.raises(ValueError, match=r"2,146,435,073 columns: a state reads 2,146,435,072 at most"):
        rnn.read(tokens(1, 2), state)
    assert torch.equal(state.positions(0), before)
    rnn.step(tokens(1, 1), state)
    with pytest.raises(ValueError, match="at most"):
        rnn.step(tokens(1, 1), state)
