"""A mask that is more than causal order and padding is refused, and what is refused leaves the cache as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

import msrnn
from msrnn.errors import UsageError
from tests.helpers.tiny import build, greedy, left_padded, llama, tokens

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}


def causal(length: int) -> torch.Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def cached(model: tf.PreTrainedModel, size: int = 64) -> msrnn.MultiStateCache:
    return msrnn.MultiStateCache(model, "tova", size)


@torch.no_grad()
def test_a_causal_mask_in_four_dimensions_is_read() -> None:
    model, ids = build(llama()), tokens(2, 12)
    expected = model(ids).logits
    mask = causal(12).expand(2, -1, -1, -1)
    torch.testing.assert_close(
        model(ids, attention_mask=mask, past_key_values=cached(model)).logits, expected, atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
def test_padding_in_four_dimensions_is_padding() -> None:
    model = build(llama())
    ids, flat = left_padded(tokens(2, 12), [0, 5])
    whole = causal(12) & flat.bool()[:, None, None] & flat.bool()[:, None, :, None]
    positions = (flat.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=flat, position_ids=positions).logits
    cache = cached(model)
    bounded = model(ids, attention_mask=whole, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(bounded[flat.bool()], expected[flat.bool()], atol=1e-4, rtol=1e-4)
    assert cache.state.seen.tolist() == [12, 7]


def with_hole(length: int) -> torch.Tensor:
    mask = causal(length)
    mask[0, 0, 6:, 3] = False
    return mask


def both_directions(length: int) -> torch.Tensor:
    mask = causal(length)
    mask[0, 0, 2:5, 2:5] = True
    return mask


def packed(length: int) -> torch.Tensor:
    mask = causal(length)
    mask[0, 0, 6:, :6] = False
    return mask


@pytest.mark.parametrize("make", [with_hole, both_directions, packed])
@torch.no_grad()
def test_other_masks_are_refused_and_change_nothing(make: Any) -> None:
    model, ids = build(llama()), tokens(1, 10)
    expected = model(ids).logits
    cache = cached(model)
    with pytest.raises(ValueError, match=r"attention mask: in sequence 0, column \d+ (sees|does not see) column \d+"):
        model(ids, attention_mask=make(10), past_key_values=cache)
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_mask_that_changes_is_looked_at_again() -> None:
    model, ids, mask = build(llama()), tokens(1, 10), causal(10)
    model(ids, attention_mask=mask, past_key_values=cached(model))
    mask[0, 0, 6:, 3] = False
    with pytest.raises(ValueError, match="column 6 does not see column 3"):
        model(ids, attention_mask=mask, past_key_values=cached(model))


@torch.no_grad()
def test_a_mask_over_columns_of_the_past_is_refused() -> None:
    model, cache = build(llama()), None
    cache = cached(model, 8)
    model(tokens(1, 10), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention mask of shape \[1, 1, 1, 11\]: must cover the 1 new columns"):
        model(tokens(1, 1), attention_mask=torch.ones(1, 1, 1, 11, dtype=torch.bool), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention mask of torch\.float32"):
        model(tokens(1, 2), attention_mask=torch.zeros(1, 1, 2, 2), past_key_values=cache)


@torch.no_grad()
def test_a_sliding_mask_is_the_layers_own() -> None:
    model, ids = build(tf.MistralConfig(**SMALL, sliding_window=4)), tokens(1, 12)
    expected = model(ids).logits
    columns = torch.arange(12)
    banded = causal(12) & (columns[:, None] - columns < 4)
    cache = cached(model, 8)
    torch.testing.assert_close(
        model(ids, attention_mask=banded, past_key_values=cache).logits, expected, atol=1e-4, rtol=1e-4
    )
    with pytest.raises(ValueError, match="does not see"):
        model(ids, attention_mask=causal(12) & (columns[:, None] - columns < 3), past_key_values=cached(model, 8))


def gemma3() -> tf.PreTrainedModel:
    text = tf.Gemma3TextConfig(**SMALL, query_pre_attn_scalar=16, sliding_window=64)
    vision = tf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = tf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=96)
    torch.manual_seed(0)
    model = tf.Gemma3ForConditionalGeneration(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.1)
    return model


@torch.no_grad()
def test_an_image_that_is_seen_in_both_directions_is_refused() -> None:
    model = gemma3()
    ids = tokens(1, 12).clamp(max=95)
    plain = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    expected = model(**plain).logits
    torch.testing.assert_close(model(**plain, past_key_values=cached(model)).logits, expected, atol=1e-4, rtol=1e-4)
    ids = ids.clone()
    ids[0, 2:6] = 96
    asked = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": (ids == 96).long()}
    with pytest.raises(ValueError, match="masks for images, prefixes, packed sequences or holes are not supported"):
        model(**asked, past_key_values=cached(model))


BOTH_WAYS = {
    "bert": lambda: build(tf.BertConfig(**{k: v for k, v in SMALL.items() if k not in ("num_key_value_heads",)})),
    "config.is_causal": lambda: build(tf.LlamaConfig(**SMALL, is_causal=False)),
    "gemma3": lambda: build(
        tf.Gemma3TextConfig(**SMALL, query_pre_attn_scalar=16, use_bidirectional_attention=True, sliding_window=64)
    ),
}


@pytest.mark.parametrize("wrap", [msrnn.MultiStateCache, msrnn.MultiStateRNN])
@pytest.mark.parametrize("kind", BOTH_WAYS)
def test_models_that_attend_in_both_directions_are_refused(kind: str, wrap: Any) -> None:
    model = BOTH_WAYS[kind]()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"attends to later tokens|is_causal|encoder"):
        wrap(model, "tova", 8)
    assert model.config._attn_implementation == before


def right(mask: torch.Tensor) -> None:
    mask[1, 8:] = 0


def on_both_sides(mask: torch.Tensor) -> None:
    mask[1, :2] = mask[1, 9:] = 0


@pytest.mark.parametrize("chunk", [None, 1, 4, 11])
@pytest.mark.parametrize("pad", [right, on_both_sides])
def test_padding_on_the_right_is_refused_where_the_model_continues(pad: Any, chunk: int | None) -> None:
    """transformers continues from the padding: its own answer would be wrong without an error."""
    model, ids = build(llama(eos_token_id=None)), tokens(2, 12)
    mask = torch.ones_like(ids)
    pad(mask)
    cache = cached(model)
    with pytest.raises(UsageError, match=r"sequence 1 ends with padding.*pad on the left"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, prefill_chunk_size=chunk, **greedy())
    if chunk is None:
        assert cache.get_seq_length() == 0
    rnn = msrnn.MultiStateRNN(model, "tova", 64)
    for state in (None, rnn.state(2)):
        with pytest.raises(UsageError, match="pad on the left"):
            rnn.generate(ids, state=state, attention_mask=mask, **greedy())


@torch.no_grad()
def test_a_forward_pass_refuses_padding_after_tokens_and_step_reads_it() -> None:
    model, ids = build(llama()), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    cache, rnn = cached(model), msrnn.MultiStateRNN(model, "tova", 64)
    model(ids[:, :-1], past_key_values=cache)
    with pytest.raises(UsageError, match="sequence 1 ends with padding"):
        model(ids[:, -1:], attention_mask=mask, past_key_values=cache)
    assert cache.state.seen.tolist() == [11, 11]
    state = rnn.state(2)
    rnn.read(ids, state, mask)
    assert state.seen.tolist() == [12, 11]


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_padding_on_the_left_is_read_as_the_model_reads_it(chunk: int | None) -> None:
    model, ids = build(llama(eos_token_id=None)), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    expected = model.generate(ids, attention_mask=mask, **greedy())
    found = model.generate(
        ids, attention_mask=mask, past_key_values=cached(model), prefill_chunk_size=chunk, **greedy()
    )
    assert torch.equal(found, expected)


def test_holes_in_a_flat_mask_are_read_as_the_model_reads_them() -> None:
    model, ids = build(llama(eos_token_id=None)), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 5:8] = 0
    expected = model.generate(ids, attention_mask=mask, **greedy())
    rnn = msrnn.MultiStateRNN(model, "tova", 64)
    assert torch.equal(rnn.generate(ids, attention_mask=mask, **greedy()), expected)
    assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=rnn.cache(), **greedy()), expected)
