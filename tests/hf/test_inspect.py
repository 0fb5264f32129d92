"""A model is inspected once, and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.errors import UsageError
from msrnn.hf.inspect import inspect_model
from tests.helpers.tiny import FAMILIES, build, greedy, llama, tokens


@contextmanager
def forward_passes(model: PreTrainedModel) -> Iterator[list[int]]:
    seen: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(1))
    try:
        yield seen
    finally:
        handle.remove()


def test_inspection_leaves_a_model_as_it_was() -> None:
    model = build(llama())
    model.set_attn_implementation("eager")
    model.train()
    model.lm_head.eval()
    spec = inspect_model(model)
    assert model.config._attn_implementation == "eager"
    assert (model.training, model.lm_head.training) == (True, False)
    assert [layer.shape.kv_heads for layer in spec.layers if layer] == [2, 2]
    assert (spec.dtype, spec.windows, spec.last_position) == ("float32", [None, None], None)


def test_one_inspection_serves_all() -> None:
    model = build(llama())
    msrnn.MultiStateRNN(model, "tova", 8, positions="compressed")
    with forward_passes(model) as passes:
        msrnn.MultiStateRNN(model, "h2o", 9, positions="compact")
        msrnn.MultiStateRNN(model, "echo", 9, state_dtype="int8")
        msrnn.MultiStateCache(model, "tova", 8)
    assert not passes


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.load_state_dict({**model.state_dict(), "lm_head.weight": torch.ones(97, 48)}),
        lambda model: setattr(model.config, "max_position_embeddings", 4),
        lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.zeros(97, 48))),
        lambda model: model.lm_head.weight.data.mul_(2),
    ],
    ids=["dtype", "trained", "config", "replaced", "data"],
)
def test_a_changed_model_is_inspected_again(change: object) -> None:
    model = build(llama())
    before = inspect_model(model)
    assert inspect_model(model) is before
    change(model)  # type: ignore[operator]
    assert inspect_model(model) is not before


def test_autocast_is_inspected_apart() -> None:
    model = build(llama())
    with torch.autocast("cpu", torch.bfloat16):
        inside = inspect_model(model)
        assert inspect_model(model) is inside
    assert inspect_model(model) is not inside


def test_a_model_that_was_given_back() -> None:
    model = build(llama())
    model.set_attn_implementation("eager")
    model.train()
    ids = tokens(1, 20)
    with msrnn.MultiStateRNN(model, "tova", 8) as rnn:
        state = rnn.state()
        rnn.read(ids, state)
        assert (model.config._attn_implementation, model.training) == ("msrnn", False)
        msrnn.MultiStateRNN(model, "h2o", 8)  # a second wrap does not hide how the model was
    assert (model.config._attn_implementation, model.training) == ("eager", True)
    with pytest.raises(UsageError, match="the model's attention is now 'eager'"):
        rnn.step(ids[:, :1], state)
    again = msrnn.MultiStateRNN(model, "tova", 8)
    again.detach()
    again.detach()
    assert model.config._attn_implementation == "eager"


def test_the_last_of_several_wraps_gives_the_model_back() -> None:
    model = build(llama())
    model.set_attn_implementation("eager")
    model.train()
    ids = tokens(1, 12)
    with msrnn.MultiStateRNN(model, "tova", 8) as outer:
        with msrnn.MultiStateRNN(model, "h2o", 8) as inner:
            inner.read(ids, inner.state())
        assert (model.config._attn_implementation, model.training) == ("msrnn", False)
        outer.read(ids, outer.state())
    assert (model.config._attn_implementation, model.training) == ("eager", True)


def test_a_refused_wrap_leaves_a_model_as_it_was() -> None:
    model = build(FAMILIES["gpt2"]())
    model.set_attn_implementation("eager")
    model.train()
    with pytest.raises(UsageError, match="no rotary positions"):
        msrnn.MultiStateRNN(model, "tova", 8, positions="compressed")
    assert (model.config._attn_implementation, model.training) == ("eager", True)


def test_parts_of_a_model_keep_their_own_attention() -> None:
    import transformers as tf

    config = tf.Gemma3Config(
        text_config=FAMILIES["gemma3"]().to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    )
    model = tf.Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    parts = [c._attn_implementation for c in (model.config, model.config.text_config, model.config.vision_config)]
    inspect_model(model)
    assert parts == [
        c._attn_implementation for c in (model.config, model.config.text_config, model.config.vision_config)
    ]


def test_a_cache_of_an_rnn_is_for_stock_generate() -> None:
    model = build(llama(eos_token_id=None))
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 8, positions="compact"), tokens(2, 20)
    with forward_passes(model) as passes:
        cache = rnn.cache()
    assert not passes
    stock = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **greedy())
    assert torch.equal(stock, rnn.generate(ids, **greedy()))
    assert (rnn.device, rnn.config) == (model.device, model.config)


@pytest.mark.parametrize("given", [torch.int8, "int8", "torch.int8"])
def test_a_state_dtype_is_a_dtype_or_its_name(given: object) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 8, state_dtype=given)  # type: ignore[arg-type]
    assert rnn.spec.fingerprint["dtype"] == "int8"
    assert rnn.state().layers[0].keys.dtype == torch.int8
