"""Tables of learned positions end: a token past the end is refused, and nothing is read."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

import msrnn
from msrnn.errors import UsageError
from tests.helpers.tiny import FAMILIES, build, llama, tokens


def cached(model: tf.PreTrainedModel, size: int = 8) -> msrnn.MultiStateCache:
    return msrnn.MultiStateCache(model, "tova", size)


_IDS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LEARNED = {  # positions 0 to 23
    "gpt2": tf.GPT2Config(**_IDS, n_embd=48, n_layer=2, n_head=6, n_positions=24),
    "gpt_bigcode": tf.GPTBigCodeConfig(**_IDS, n_embd=48, n_layer=2, n_head=6, n_positions=24),
    "opt": tf.OPTConfig(
        **_IDS,
        hidden_size=48,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=6,
        max_position_embeddings=24,
        word_embed_proj_dim=48,
    ),
}
PAST_THE_TABLE = "position 24: this model has learned positions 0 to 23 only; read a shorter text"


@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode"])
def test_a_forward_past_the_learned_positions_is_refused_and_reads_nothing(family: str) -> None:
    model, ids = build(LEARNED[family]), tokens(2, 24)
    cache, other = cached(model), cached(model)
    with torch.no_grad():
        with pytest.raises(UsageError, match=PAST_THE_TABLE):
            model(tokens(2, 25), past_key_values=cache)
        assert cache.get_seq_length() == 0
        model(ids[:, :20], past_key_values=cache)
        with pytest.raises(UsageError, match=PAST_THE_TABLE):
            model(tokens(2, 5), past_key_values=cache)
        assert cache.state.seen.tolist() == [20, 20]
        for column in range(20, 24):
            last = model(ids[:, column : column + 1], past_key_values=cache).logits
        for _ in range(2):
            with pytest.raises(UsageError, match=PAST_THE_TABLE):
                model(ids[:, :1], past_key_values=cache)
            assert cache.get_seq_length() == 24
            assert cache.state.seen.tolist() == [24, 24]
        torch.testing.assert_close(model(ids, past_key_values=other).logits[:, -1:], last, atol=1e-5, rtol=1e-5)


def test_position_ids_of_the_caller_that_the_table_has_are_read_past_its_length() -> None:
    model = build(LEARNED["gpt2"])
    cache = cached(model)
    with torch.no_grad():
        model(tokens(1, 24), past_key_values=cache)
        for count in (1, 3):
            model(tokens(1, count), past_key_values=cache, position_ids=torch.full((1, count), 23))
    assert cache.state.seen.tolist() == [28]


@pytest.mark.parametrize("family", LEARNED)
def test_generate_from_a_cache_at_the_end_of_the_learned_positions_is_refused(family: str) -> None:
    model, ids = build(LEARNED[family]), tokens(1, 25)
    settings = {"max_new_tokens": 1, "eos_token_id": None, "pad_token_id": 0}
    cache = cached(model)
    model.generate(ids[:, :24], attention_mask=torch.ones(1, 24), past_key_values=cache, **settings)
    before = cache.state.fork(1)
    with pytest.raises(UsageError, match=PAST_THE_TABLE):
        model.generate(ids, attention_mask=torch.ones(1, 25), past_key_values=cache, **settings)
    assert torch.equal(cache.state.positions(0), before.positions(0))


@pytest.mark.parametrize("family", LEARNED)
def test_generate_with_a_prompt_past_the_learned_positions_reads_nothing(family: str) -> None:
    """The model looks into its table before it asks the cache how long the prompt is."""
    model, ids = build(LEARNED[family]), tokens(1, 25)
    cache = cached(model)
    with pytest.raises(IndexError):
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1)
    assert cache.get_seq_length() == 0


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def test_learned_positions_end() -> None:
    rnn = msrnn.MultiStateRNN(build(FAMILIES["gpt2"]()), "tova", 8)
    known = rnn.model.config.n_positions
    state = rnn.state()
    rnn.read(tokens(1, known), state, last_only=True)
    with pytest.raises(ValueError, match=f"learned positions 0 to {known - 1:,}"):
        rnn.step(tokens(1, 1), state)


def test_learned_positions_end_with_a_line() -> None:
    config = FAMILIES["gpt2"]()
    config.n_positions = 24
    rnn = msrnn.MultiStateRNN(build(config), "tova", 9)
    with pytest.raises(ValueError, match="position 24: this model has learned positions 0 to 23"):
        rnn.generate(tokens(1, 20), max_new_tokens=10, eos_token_id=None)
    assert rnn.generate(tokens(1, 20), max_new_tokens=5, eos_token_id=None).shape == (1, 25)


def test_a_cache_reads_to_the_end_of_learned_positions_and_not_past_it() -> None:
    config = FAMILIES["gpt2"]()
    config.n_positions = 24
    model, ids, mask = build(config), tokens(1, 25), torch.ones(1, 25, dtype=torch.long)
    mask[:, :5] = 0  # padding takes no position
    past_it = pytest.raises(UsageError, match="position 24: this model has learned positions 0 to 23 only; read a shor")
    for count, beams, end in ((5, 1, nullcontext()), (6, 1, past_it), (5, 2, nullcontext()), (6, 2, past_it)):
        cache = msrnn.MultiStateCache(model, "tova", 9)
        with end:
            model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=count,
                num_beams=beams,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert set(cache.state.seen.tolist()) == {24}
