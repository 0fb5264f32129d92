"""A wrapped model is given back as it was: its attention, its training mode and its logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.errors import UsageError
from tests.helpers.tiny import build, greedy, llama, tokens


@pytest.fixture
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None)).train()


def is_wrapped(model: PreTrainedModel) -> bool:
    found = model.config._attn_implementation, model.training
    assert found in (("msrnn", False), ("eager", True))
    return found[0] == "msrnn"


def rnn_of(model: PreTrainedModel) -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(model, "tova", 8)


def cache_of(model: PreTrainedModel) -> msrnn.MultiStateCache:
    return msrnn.MultiStateCache(model, "tova", 8)


MAKE = {"rnn": rnn_of, "cache": cache_of}
Make = Callable[[PreTrainedModel], Any]


@pytest.mark.parametrize("inside", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("outside", MAKE.values(), ids=MAKE)
def test_a_with_block_gives_the_model_back_whatever_was_made_inside(
    outside: Make, inside: Make, model: PreTrainedModel
) -> None:
    ids = tokens(1, 20)
    expected = model(ids).logits
    with outside(model):
        kept = [inside(model), inside(model)]
        assert is_wrapped(model)
    assert not is_wrapped(model)
    assert torch.equal(model(ids).logits, expected)
    del kept


def test_what_outlives_a_with_block_is_refused(model: PreTrainedModel) -> None:
    ids = tokens(1, 12)
    with rnn_of(model) as rnn:
        caches = [cache_of(model), rnn.cache()]
        state = rnn.state()
        for cache in caches:
            model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **greedy())
    for cache in caches:
        with pytest.raises(UsageError, match="the model's attention is now 'eager'"), torch.no_grad():
            model(ids[:, :1], past_key_values=cache)
    with pytest.raises(UsageError, match="the model's attention is now 'eager'"):
        rnn.read(ids, state)


@pytest.mark.parametrize("before", MAKE.values(), ids=MAKE)
def test_what_was_made_before_a_block_goes_on_after_it(before: Make, model: PreTrainedModel) -> None:
    first = before(model)
    with rnn_of(model), cache_of(model):
        assert is_wrapped(model)
    assert is_wrapped(model)
    first.detach()
    assert not is_wrapped(model)


def test_nested_blocks(model: PreTrainedModel) -> None:
    with rnn_of(model) as outer:
        with rnn_of(model), outer.cache(), cache_of(model):
            assert is_wrapped(model)
        assert is_wrapped(model)
        outer.read(tokens(1, 12), outer.state())
    assert not is_wrapped(model)


def test_a_block_that_began_inside_another_one_and_ends_later(model: PreTrainedModel) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(rnn_of(model))
    rnn = second.enter_context(rnn_of(model))
    first.close()
    rnn.read(tokens(1, 12), rnn.state())
    second.close()
    assert not is_wrapped(model)


def test_a_cache_outlives_its_rnn(model: PreTrainedModel) -> None:
    cache = rnn_of(model).cache()
    ids = tokens(1, 12)
    with cache, torch.no_grad():
        model(ids, past_key_values=cache)
    assert not is_wrapped(model)


def test_a_cache_alone_gives_the_model_back(model: PreTrainedModel) -> None:
    cache = cache_of(model)
    assert is_wrapped(model)
    cache.detach()
    cache.detach()
    assert not is_wrapped(model)
    with pytest.raises(KeyError), cache_of(model):
        raise KeyError
    assert not is_wrapped(model)


def test_a_model_that_no_longer_exists() -> None:
    with cache_of(build(llama())) as cache:
        pass
    cache.detach()


def test_what_wrappers_say_of_themselves(model: PreTrainedModel) -> None:
    options = "policy='tova', size=8, dtype='float32', positions='original'"
    named = f"LlamaForCausalLM(layers 2, hidden size 48, vocabulary 97), {options}"
    rnn, cache = rnn_of(model), cache_of(model)
    assert repr(rnn) == f"MultiStateRNN({named}, device='cpu')"
    assert repr(msrnn.Engine(rnn, slots=3)) == f"Engine(LocalExecutor({rnn!r}, slots=3))"
    assert repr(cache) == f"MultiStateCache({named}, seen=[])"
    with torch.no_grad():
        model(tokens(2, 12), past_key_values=cache)
    assert repr(cache) == f"MultiStateCache({named}, seen=[12, 12])"
    assert repr(cache.state).startswith("MultiState(policy='tova', size=8, batch_size=2, seen=[12, 12]")
