from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import DynamicCache

import msrnn
from tests.helpers.tiny import SMALL, build, llama, tokens


def cached(model: tf.PreTrainedModel, size: int = 8) -> msrnn.MultiStateCache:
    return msrnn.MultiStateCache(model, "tova", size)


def test_a_cache_counts_columns_and_never_fills_up() -> None:
    model = build(llama())
    cache = cached(model)
    with pytest.raises(ValueError, match="nothing yet"):
        _ = cache.state
    with torch.no_grad():
        model(tokens(2, 30), past_key_values=cache)
    assert cache.get_seq_length() == 30
    assert cache.get_mask_sizes(5, 0) == (5, 30)
    assert cache.get_max_length() == -1
    assert cache.state.seen.tolist() == [30, 30]
    assert (cache.state.positions(0) >= 0).sum(-1).tolist() == [[8], [8]]


def test_a_cache_goes_on_under_stock_generate() -> None:
    model = build(llama(eos_token_id=None))
    ids, more = tokens(1, 20), tokens(1, 5, seed=4)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    cache = cached(model)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings)
    longer = torch.cat([out, more], dim=1)
    again = model.generate(longer, attention_mask=torch.ones_like(longer), past_key_values=cache, **settings)
    rnn = msrnn.MultiStateRNN(model, "tova", 8)
    assert torch.equal(again, rnn.generate(longer, **settings))


def test_another_attention_implementation_is_noticed() -> None:
    model = build(llama())
    cache = cached(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="'sdpa'"), torch.no_grad():
        model(tokens(1, 5), past_key_values=cache)


def test_an_ordinary_cache_still_works() -> None:
    model = build(llama())
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **settings)
    cached(model)
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(config=model.config), **settings), expected)


def test_a_float_mask_is_refused() -> None:
    model = build(llama())
    with pytest.raises(ValueError, match="float32"), torch.no_grad():
        model(tokens(1, 4), attention_mask=torch.zeros(1, 1, 4, 4), past_key_values=cached(model))


REFUSED: dict[str, tuple[Callable[[], tf.PreTrainedModel], str]] = {
    "encoder-decoder": (
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        "encoder-decoder",
    ),
    "linear": (
        lambda: tf.MambaForCausalLM(tf.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)),
        "bounded already",
    ),
    "alibi": (
        lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2)),
        "AttentionInterface",
    ),
    "attends twice": (lambda: build(tf.DiffLlamaConfig(**SMALL)), "more than once"),
    "positions from two on": (
        lambda: build(tf.RobertaConfig(**SMALL, is_decoder=True, max_position_embeddings=64, initializer_range=0.2)),
        "ignores the position ids",
    ),
    "positions by the cache": (
        lambda: build(
            tf.BartConfig(
                vocab_size=97,
                d_model=48,
                decoder_layers=1,
                num_hidden_layers=1,
                decoder_attention_heads=2,
                decoder_ffn_dim=16,
                is_encoder_decoder=False,
                init_std=0.2,
            )
        ),
        "ignores the position ids",
    ),
    "forgets between reads": (
        lambda: build(
            tf.JambaConfig(
                **SMALL, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_d_state=4, initializer_range=0.2
            )
        ),
        "read in two parts",
    ),
    "no head": (lambda: build(llama()).model, "AutoModelForCausalLM"),
    "no weights": (lambda: build(llama()).to("meta"), "meta device"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_bounded_is_refused_with_a_reason(kind: str) -> None:
    make, reason = REFUSED[kind]
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        msrnn.MultiStateRNN(model, "tova", 8)
    assert model.config._attn_implementation == before


def test_an_image_is_seen_whole() -> None:
    """What attends without a state, and not causally, goes on to do so."""
    vision = tf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = tf.LlavaConfig(text_config=llama(), vision_config=vision, image_token_index=96, vision_feature_layer=-1)
    torch.manual_seed(0)
    model = tf.LlavaForConditionalGeneration(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    ids = tokens(1, 12).clamp(max=95)
    ids[0, 2:6] = 96
    asked = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28)}
    with torch.no_grad():
        expected = model(**asked).logits
        bounded = model(**asked, past_key_values=cached(model, 64)).logits
        torch.testing.assert_close(bounded, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(**asked).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_model_that_was_cast_is_told_of() -> None:
    model = build(llama())
    rnn = msrnn.MultiStateRNN(model, "tova", 8)
    state = rnn.state()
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"keys of torch\.bfloat16 do not fit a state of torch\.float32"):
        rnn.read(tokens(1, 4), state)
