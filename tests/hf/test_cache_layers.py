"""Layers of a cache: rows are reset, repeated and selected, and nothing that was read is taken back."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import msrnn
from tests.helpers.tiny import build, llama, tokens


def cached(model: tf.PreTrainedModel, size: int = 8) -> msrnn.MultiStateCache:
    return msrnn.MultiStateCache(model, "tova", size)


def test_a_reset_cache_is_empty_again() -> None:
    model = build(llama())
    cache = cached(model)
    ids = tokens(1, 20)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(model(ids, past_key_values=cache).logits, first)


def test_rows_of_a_cache_can_be_repeated_and_selected() -> None:
    model = build(llama())
    cache = cached(model)
    with torch.no_grad():
        model(tokens(2, 20), past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
        logits = model(tokens(2, 3, seed=2), past_key_values=cache).logits
    rnn = msrnn.MultiStateRNN(model, "tova", 8)
    state = rnn.state(2)
    rnn.read(tokens(2, 20), state)
    torch.testing.assert_close(logits, rnn.read(tokens(2, 3, seed=2), state))


def test_a_batch_that_does_not_fit_is_named() -> None:
    model = build(llama())
    cache = cached(model)
    with torch.no_grad():
        model(tokens(2, 5), past_key_values=cache)
        with pytest.raises(ValueError, match="batch of 3 does not fit a state of 2"):
            model(tokens(3, 5), past_key_values=cache)


def test_gradients_are_refused_rather_than_lost() -> None:
    model = build(llama())
    with pytest.raises(ValueError, match="no_grad"):
        model(tokens(1, 5), past_key_values=cached(model))
