"""One count of columns: transformers calls layers one by one, and a forward pass counts once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.errors import UsageError
from tests.helpers.tiny import build, hybrid, llama, tokens


@pytest.mark.parametrize("policy", ["tova", "full"])
@torch.no_grad()
def test_every_layer_of_a_forward_pass_is_told_the_columns_before_it(policy: str) -> None:
    model = build(llama())
    cache = msrnn.MultiStateCache(model, policy, None if policy == "full" else 8)
    told: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, i=i: told.append(int(cache.get_seq_length(i))))
        for i, layer in enumerate(model.model.layers)
    ]
    for width in (5, 1, 7):
        model(tokens(2, width), past_key_values=cache)
    for hook in hooks:
        hook.remove()
    assert told == [0, 0, 5, 5, 6, 6]
    assert cache.get_seq_length() == cache.state.columns == 13
    assert cache.state.seen.tolist() == [13, 13]


@torch.no_grad()
def test_a_pass_that_is_refused_counts_nothing() -> None:
    model = build(llama())
    cache, other = (msrnn.MultiStateCache(model, "tova", 8) for _ in range(2))
    for one in (cache, other):
        model(tokens(1, 5), past_key_values=one)
    with pytest.raises(UsageError, match="position 0 again"):
        model(tokens(1, 5), past_key_values=cache, position_ids=torch.arange(5)[None])
    with pytest.raises(UsageError, match="batch of 2"):
        model(tokens(2, 1), past_key_values=cache)
    assert cache.state.columns == 5
    found, expected = (model(tokens(1, 3, seed=2), past_key_values=one).logits for one in (cache, other))
    assert torch.equal(found, expected)


@torch.no_grad()
def test_a_cache_interrupted_between_layers_reads_no_more_until_it_is_reset() -> None:
    model = build(llama())
    cache = msrnn.MultiStateCache(model, "tova", 8)
    expected = model(tokens(1, 5), past_key_values=cache).logits

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens(1, 1), past_key_values=cache)
    hook.remove()
    assert cache.state.columns == 5
    for unusable in (cache, copy.deepcopy(cache)):
        with pytest.raises(UsageError, match="interrupted inside a forward pass"):
            model(tokens(1, 1), past_key_values=unusable)
        with pytest.raises(UsageError, match="interrupted inside a forward pass"):
            unusable.state.check_whole()
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(tokens(1, 5), past_key_values=cache).logits, expected)


@pytest.mark.parametrize("made", [lambda: build(llama()), hybrid])
@torch.no_grad()
def test_a_copy_counts_for_itself(made: Any) -> None:
    model: PreTrainedModel = made()
    cache = msrnn.MultiStateCache(model, "tova", 8)
    fresh = copy.deepcopy(cache)
    first = model(tokens(1, 5), past_key_values=cache).logits
    copied = copy.deepcopy(cache)
    later = model(tokens(1, 1, seed=3), past_key_values=cache).logits
    assert (fresh.get_seq_length(), copied.state.columns, cache.state.columns) == (0, 5, 6)
    assert torch.equal(model(tokens(1, 1, seed=3), past_key_values=copied).logits, later)
    assert torch.equal(model(tokens(1, 5), past_key_values=fresh).logits, first)


@torch.no_grad()
def test_an_rnn_goes_on_with_the_state_of_a_cache() -> None:
    """They count in the same place."""
    model = build(llama())
    rnn = msrnn.MultiStateRNN(model, "full", None)
    cache, state = rnn.cache(), rnn.state()
    model(tokens(1, 5), past_key_values=cache)
    rnn.read(tokens(1, 4, seed=1), cache.state)
    found = model(tokens(1, 3, seed=2), past_key_values=cache).logits
    expected = rnn.read(torch.cat([tokens(1, 5), tokens(1, 4, seed=1), tokens(1, 3, seed=2)], dim=1), state)
    assert cache.get_seq_length() == state.columns == 12
    torch.testing.assert_close(found, expected[:, -3:], atol=1e-5, rtol=1e-5)
