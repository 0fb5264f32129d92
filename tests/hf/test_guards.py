"""What a cache and a model refuse instead of computing on: other models, interruptions, training, damaged weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers as tf

import msrnn
from tests.helpers.tiny import SMALL, build, llama, tokens


def cached(model: tf.PreTrainedModel, size: int = 8) -> msrnn.MultiStateCache:
    return msrnn.MultiStateCache(model, "tova", size)


@torch.no_grad()
def test_a_copy_of_a_cache_is_a_cache_of_the_same_model() -> None:
    model, ids = build(llama()), tokens(2, 20)
    cache = cached(model)
    model(ids, past_key_values=cache)
    copied = copy.deepcopy(cache)
    step = tokens(2, 1, seed=4)
    expected = model(step, past_key_values=cache).logits
    assert copied.state.seen.tolist() == [20, 20]
    assert torch.equal(model(step, past_key_values=copied).logits, expected)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention is now 'sdpa'"):
        model(step, past_key_values=copied)


@pytest.mark.parametrize("attention", ["msrnn", "sdpa", "eager"])
@torch.no_grad()
def test_a_cache_of_another_model_is_refused(attention: str) -> None:
    cache, other = cached(build(llama())), build(llama())
    other.set_attn_implementation(attention)
    with pytest.raises(ValueError, match="make a MultiStateCache for"):
        other(tokens(1, 12), past_key_values=cache)


@torch.no_grad()
def test_positions_of_one_row_serve_a_batch() -> None:
    model, ids = build(llama()), tokens(2, 20)
    mask, positions = torch.ones_like(ids), torch.arange(20)[None]
    mask[1, 8:10] = 0
    cache = cached(model, 64)
    model(ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], past_key_values=cache)
    model(ids[:, 8:], attention_mask=mask, position_ids=positions[:, 8:], past_key_values=cache)
    assert cache.state.seen.tolist() == [20, 18]


@torch.no_grad()
def test_a_cache_of_a_copied_model_is_refused() -> None:
    model = build(llama())
    cache = cached(model)
    with pytest.raises(ValueError, match="made for another model"):
        copy.deepcopy(model)(tokens(1, 12), past_key_values=cache)


@torch.no_grad()
def test_a_cache_interrupted_in_its_last_layer_does_not_save(tmp_path: Path) -> None:
    model = build(llama())
    cache = cached(model)
    model(tokens(1, 12), past_key_values=cache)
    last = cache.layers[-1].memory

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    last.keep = interrupted  # after positions and importances have moved on
    last.write = interrupted
    with pytest.raises(KeyboardInterrupt):
        model(tokens(1, 5), past_key_values=cache)
    with pytest.raises(ValueError, match="interrupted inside a forward pass"):
        cache.state.save(tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match="interrupted inside a forward pass"):
        model(tokens(1, 5), past_key_values=cache)


def test_a_refused_model_stays_in_training_mode() -> None:
    model = build(tf.DiffLlamaConfig(**SMALL)).train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="more than once"):
        msrnn.MultiStateRNN(model, "tova", 8)
    assert {name: module.training for name, module in model.named_modules()} == modes


def gpt2(dropout: float) -> tf.PreTrainedModel:
    config = tf.GPT2Config(
        n_embd=48, n_layer=2, n_head=6, vocab_size=97, attn_pdrop=dropout, resid_pdrop=0.0, embd_pdrop=0.0
    )
    return build(config)


def test_without_a_bounded_cache_dropout_is_applied_in_training() -> None:
    model, ids = gpt2(0.5), tokens(1, 20)
    expected = model(ids).logits
    msrnn.MultiStateRNN(model, "tova", 8)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    model.train()
    torch.manual_seed(0)
    dropped = model(ids).logits
    assert not torch.allclose(dropped, expected, atol=1e-2)
    assert not torch.allclose(dropped, model(ids).logits, atol=1e-2)


@torch.no_grad()
def test_a_bounded_cache_refuses_dropout() -> None:
    model = gpt2(0.5)
    cache = cached(model)
    model.train()
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        model(tokens(1, 20), past_key_values=cache)


@torch.no_grad()
def test_attention_weights_are_returned_or_refused() -> None:
    model, ids = build(llama()), tokens(1, 12)
    expected = model(ids, output_attentions=True).attentions
    cache = cached(model)
    found = model(ids, output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, past_key_values=cache, output_attentions=True)


def test_a_sliding_window_is_part_of_what_a_state_fits() -> None:
    states = []
    for window in (12, 6):
        rnn = msrnn.MultiStateRNN(build(tf.MistralConfig(**SMALL, sliding_window=window)), "tova", 8)
        states.append(rnn.state())
    with pytest.raises(ValueError, match="windows"):
        rnn.read(tokens(1, 4), states[0])


def test_a_hybrid_model_that_steps_by_another_formula_is_refused() -> None:
    config = tf.NemotronHConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        layers_block_type=["mamba", "attention", "mamba"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=4,
        initializer_range=0.2,
    )
    with pytest.raises(ValueError, match=r"read (in two parts|token by token), its logits differ"):
        msrnn.MultiStateRNN(build(config), "tova", 8)
