"""Models that read by the true future, against a model whose layers are computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from msrnn.core.scores import Scoring
from msrnn.errors import DoesNotFitError, UsageError
from msrnn.evaluation import future_reader
from msrnn.evaluation.future import Future
from msrnn.evaluation.future_reader import FutureLayer, FutureReader
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.future_by_hand import change_of_queries, read_by_hand
from tests.helpers.tiny import FAMILIES, build, hybrid, llama, tokens

LENGTH, SIZE = 40, 9


@pytest.fixture
def model() -> PreTrainedModel:
    return build(llama())


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("ahead", [7, 64, None])
def test_one_forward_pass_is_layer_after_layer(ahead: int | None, heads: int, kv_heads: int) -> None:
    model, ids = build(llama(heads, kv_heads)), tokens(2, LENGTH)
    losses, times = FutureReader(model, Future(SIZE, ahead), 1).read(ids)
    for row in range(2):
        logits, expected = read_by_hand(model, ids[row, :-1], [SIZE, SIZE], ahead)
        assert times[row].tolist() == expected
        torch.testing.assert_close(losses[row], cross_entropy(logits, ids[row, 1:], reduction="none"))


def test_a_layer_evicts_by_what_the_layer_below_has_evicted(model: PreTrainedModel) -> None:
    ids = tokens(1, LENGTH)
    _, times = FutureReader(model, Future(SIZE), 1).read(ids)
    _, (first, second) = read_by_hand(model, ids[0, :-1], [LENGTH, SIZE], 64)
    assert set(first) == {LENGTH - 1}, "it evicts nothing"
    assert times[0, 1].tolist() != second


@torch.no_grad()
def test_changes_are_those_of_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, seen = build(llama(num_hidden_layers=1, initializer_range=0.1)), tokens(1, LENGTH), list[torch.Tensor]()
    attention = model(input_ids=ids[:, :-1], output_attentions=True, use_cache=False).attentions[0][0]
    decoder: Any = model.model
    layer = decoder.layers[0]
    value = layer.self_attn.v_proj(layer.input_layernorm(decoder.embed_tokens(ids[0, :-1]))).view(LENGTH - 1, 2, 8)
    expected = change_of_queries(attention, value.transpose(0, 1).repeat_interleave(3, 0))

    def rank(changes: torch.Tensor, _: int | None) -> torch.Tensor:
        seen.append(changes)
        return changes

    monkeypatch.setattr("msrnn.evaluation.future.rank_rows", rank)
    FutureReader(model, Future(SIZE), 1).nll(ids)
    torch.testing.assert_close(seen[0][0, 1:].double(), expected[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt-neox", "gpt2", "olmo2", "mixtral"])
def test_enough_rows_are_the_unmodified_model(family: str) -> None:
    model, ids = build(FAMILIES[family]()), tokens(2, LENGTH)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    expected = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    for size in (LENGTH - 1, LENGTH):
        losses = FutureReader(model, Future(size), 1).losses(ids)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    fewer = FutureReader(model, Future(SIZE), 1).losses(ids)
    assert torch.allclose(fewer[:, : SIZE + 1], expected[:, : SIZE + 1], atol=1e-4), "nothing was missing yet"
    assert not torch.allclose(fewer[:, SIZE + 1 :], expected[:, SIZE + 1 :], atol=1e-2)


@pytest.mark.parametrize("opening", [0, 1, 3])
def test_chunks_are_read_some_at_a_time(opening: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, counted = tokens(5, LENGTH), list[int]()
    reader = FutureReader(model, Future(SIZE), opening)
    expected = reader.losses(ids)[:, max(1, opening) - 1 :].double().sum(-1).tolist()
    assert reader.count_chunks(LENGTH) >= 5
    monkeypatch.setattr(future_reader, "BYTES", {"cpu": 2 * 4 * LENGTH * (10 * LENGTH + 97)})
    assert reader.nll(ids, counted.append) == pytest.approx(expected, rel=1e-5)
    assert counted == [2 * 39, 2 * 39, 39]
    monkeypatch.setattr("msrnn.core.device_memory.available_bytes", lambda _: 4 * LENGTH * 10 * LENGTH)
    with pytest.raises(DoesNotFitError, match=r"the true future of 40 tokens takes .*: use a smaller length"):
        reader.nll(ids)


def test_a_model_is_left_as_it_was(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.train()
    reader, ids = FutureReader(model, Future(SIZE), 1), tokens(1, LENGTH)
    assert reader.nll(ids) == reader.nll(ids)
    assert (model.config._attn_implementation, model.training) == ("eager", True)
    with MultiStateRNN(model, "tova", SIZE) as rnn:
        before = rnn.read(ids, rnn.state(1))
        reader.nll(ids)
        assert torch.equal(rnn.read(ids, rnn.state(1)), before)

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(future_reader, "attend", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        reader.nll(ids)
    assert (model.config._attn_implementation, model.training) == ("eager", True)


def all_full(family: str) -> PreTrainedModel:
    """A model without a layer that slides."""
    config: Any = FAMILIES[family]()
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    return build(config)


def bloom() -> PreTrainedModel:
    config: Any = tf.BloomConfig
    return build(config(vocab_size=97, hidden_size=48, n_layer=2, n_head=6))


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "sliding": (lambda: build(FAMILIES["mistral-sliding"]()), "sliding windows, which MistralForCausalLM has"),
    "hybrid": (hybrid, "linear-attention layers, which Lfm2ForCausalLM has"),
    "soft cap": (lambda: all_full("gemma2"), "a soft cap, which this model adds to its scores"),
    "sinks": (lambda: all_full("gpt-oss"), "attention sinks, which this model adds to its scores"),
    "position bias": (bloom, "AttentionInterface"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(UsageError, match=message):
        FutureReader(model, Future(SIZE), 1).nll(tokens(1, LENGTH))
    assert model.config._attn_implementation == before


def test_a_model_that_processes_share_is_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(future_reader, "inspect_model", lambda _: SimpleNamespace(shards=object()))
    with pytest.raises(UsageError, match="policy='future': is not defined for a model that several processes share"):
        FutureReader(model, Future(SIZE), 1)


def test_padding_is_refused(model: PreTrainedModel) -> None:
    layer, rows = FutureLayer(model.config, Future(2)), torch.randn(1, 1, 4, 8)
    real = torch.ones(1, 4, dtype=torch.bool)
    assert layer.attend(rows, rows, rows, real, Scoring(1.0)).shape == (1, 4, 1, 8)
    real[0, 0] = False
    with pytest.raises(UsageError, match="not defined for padding"):
        layer.attend(rows, rows, rows, real, Scoring(1.0))
