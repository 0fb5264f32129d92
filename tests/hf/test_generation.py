from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TextStreamer,
)

import msrnn
from tests.helpers.tiny import FAMILIES, build, greedy, left_padded, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def by_hand(rnn: msrnn.MultiStateRNN, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy decoding by stepping: what generate must give."""
    state = rnn.state(len(ids))
    logits = rnn.read(ids, state, last_only=True)
    for _ in range(count):
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        logits = rnn.step(ids[:, -1:], state)
    return ids


@pytest.mark.parametrize("policy", ["tova", "h2o", "window+4"])
def test_generate_is_stepping(model: PreTrainedModel, policy: str) -> None:
    rnn = msrnn.MultiStateRNN(model, policy, 9)
    ids = tokens(2, 30)
    expected = by_hand(rnn, ids, 10)
    assert torch.equal(rnn.generate(ids, **greedy()), expected)
    stock = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=msrnn.MultiStateCache(model, policy, 9),
        **greedy(),
    )
    assert torch.equal(stock, expected)


def test_a_state_goes_on_over_prompt_and_answer(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    first, second = tokens(2, 20), tokens(2, 7, seed=8)
    state = rnn.state(2)
    answer = rnn.generate(first, state=state, **greedy())
    assert torch.equal(answer, rnn.generate(first, **greedy()))
    assert state.seen.tolist() == [30, 30]
    again = rnn.generate(second, state=state, **greedy())
    whole = rnn.generate(torch.cat([answer, second], dim=1), **greedy())
    assert torch.equal(again, whole[:, answer.shape[1] :])
    assert state.seen.tolist() == [47, 47]


@pytest.mark.parametrize("own", [None, 1])
def test_a_row_that_ended_reads_no_padding(
    model: PreTrainedModel, own: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the end that the call names, whatever the model's own is."""
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(2, 20)
    free = rnn.generate(ids, **greedy())[:, 20:]
    ends = int(free[0, 3])
    assert ends not in free[0, :3].tolist()
    assert ends not in free[1].tolist()
    state = rnn.state(2)
    monkeypatch.setattr(model.generation_config, "eos_token_id", own and int(free[own, 2]))
    rnn.generate(ids, state=state, **greedy(eos_token_id=ends, pad_token_id=0))
    assert state.seen.tolist() == [24, 30]
    alone = rnn.state()
    rnn.read(torch.cat([ids[:1], free[:1, :4]], dim=1), alone)
    assert sorted(state.positions(0)[0, 0].tolist()) == sorted(alone.positions(0)[0, 0].tolist())


def test_beams_equal_the_stock_generate(model: PreTrainedModel) -> None:
    ids = tokens(2, 20)
    ones = torch.ones_like(ids)
    beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 8}
    before = build(llama(eos_token_id=None)).generate(ids, attention_mask=ones, **beams)
    wide = msrnn.MultiStateRNN(model, "tova", 64)
    assert torch.equal(wide.generate(ids, **beams), before)
    narrow = msrnn.MultiStateRNN(model, "tova", 9)
    stock = model.generate(ids, attention_mask=ones, past_key_values=msrnn.MultiStateCache(model, size=9), **beams)
    assert torch.equal(narrow.generate(ids, **beams), stock)


def test_beams_advance_a_state_over_the_best(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(1, 20)
    state = rnn.state()
    out = rnn.generate(ids, state=state, num_beams=3, do_sample=False, max_new_tokens=8)
    expected = rnn.state()
    rnn.read(out, expected)
    assert state.seen.tolist() == [28]
    assert torch.equal(state.positions(1).sort().values, expected.positions(1).sort().values)


def test_sampling_is_seeded_and_returns_several(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(1, 20)
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        outs.append(rnn.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=8))
    assert outs[0].shape == (3, 28)
    assert torch.equal(*outs)
    assert len({tuple(row.tolist()) for row in outs[0]}) > 1


def test_generate_takes_what_transformers_takes(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(1, 20)

    def only_five(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([5]), 0.0)

    def after_three(sequences: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((len(sequences),), sequences.shape[1] >= 23)

    class Heard(TextStreamer):
        def __init__(self) -> None:
            self.heard: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.heard += value.flatten().tolist()

        def end(self) -> None:
            self.heard.append(-1)

    streamer = Heard()
    out = rnn.generate(
        ids,
        generation_config=GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=2, pad_token_id=0),
        logits_processor=LogitsProcessorList([only_five]),
        stopping_criteria=StoppingCriteriaList([after_three]),
        streamer=streamer,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert out.sequences[0, 20:].tolist() == [5, 5, 5]
    assert len(out.logits) == 3
    assert streamer.heard == [*out.sequences[0].tolist(), -1]


def test_a_prompt_of_one_token(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(1, 1)
    assert torch.equal(rnn.generate(ids, **greedy()), by_hand(rnn, ids, 10))


def test_a_config_without_a_cache_does_not_read_the_text_again() -> None:
    ids = tokens(1, 20)
    model = build(llama(eos_token_id=None))
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy())
    model.config.use_cache = model.generation_config.use_cache = False
    rnn = msrnn.MultiStateRNN(model, "tova", 64)
    assert torch.equal(rnn.generate(ids, **greedy()), expected)
    config = GenerationConfig(do_sample=False, max_new_tokens=10, use_cache=False)
    state = rnn.state()
    assert torch.equal(rnn.generate(ids, state=state, generation_config=config), expected)
    assert state.seen.tolist() == [30]
    assert config.use_cache is False
    with pytest.raises(ValueError, match="use_cache=False"):
        rnn.generate(ids, use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [[0], [0, 6]])
def test_stock_generate_without_a_cache_is_refused_by_every_family(family: str, padding: list[int]) -> None:
    model = build(FAMILIES[family]())
    cache = msrnn.MultiStateCache(model, "tova", 8)
    ids, mask = left_padded(tokens(len(padding), 20), padding)
    with pytest.raises(ValueError, match="use_cache=False makes generate read the whole text again"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, use_cache=False, **greedy())


def test_a_row_may_begin_after_others(model: PreTrainedModel) -> None:
    """Prefill in chunks, of which the first is all padding for one row."""
    ids, mask = left_padded(tokens(2, 20), [0, 12])
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    cache = msrnn.MultiStateCache(model, "tova", 9)
    stock = model.generate(ids, attention_mask=mask, past_key_values=cache, prefill_chunk_size=8, **greedy())
    assert torch.equal(rnn.generate(ids, attention_mask=mask, **greedy()), stock)


def test_stock_generate_without_a_cache_is_refused() -> None:
    ids = tokens(1, 20)
    model = build(llama(eos_token_id=None))
    for config in (model.config, model.generation_config):
        config.use_cache = False
        with pytest.raises(ValueError, match=r"use_cache=False.*set model\..*config\.use_cache = True"):
            msrnn.MultiStateCache(model, "tova", 8)
        config.use_cache = True
    cache = msrnn.MultiStateCache(model, "tova", 8)
    with pytest.raises(ValueError, match="use_cache=False makes generate read the whole text again"):
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=False, **greedy())


def test_guidance_is_the_models_own_call(device: str) -> None:
    """Classifier-free guidance calls the model with a cache of its own, one token at a time as well."""
    model = build(llama(eos_token_id=None), device)
    ids, other = tokens(1, 20).to(device), tokens(1, 7, seed=5).to(device)
    ones = torch.ones_like(ids)
    asked = greedy(guidance_scale=3.0, negative_prompt_ids=other)
    expected = model.generate(ids, attention_mask=ones, **asked)
    rnn = msrnn.MultiStateRNN(model, "tova", 64)
    assert torch.equal(rnn.generate(ids, **asked), expected)
    assert not torch.equal(rnn.generate(ids, **greedy()), expected)


def test_hidden_states_come_with_every_token(model: PreTrainedModel) -> None:
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(2, 20)
    asked: dict[str, Any] = {"return_dict_in_generate": True, "output_hidden_states": True}
    out = rnn.generate(ids, **greedy(), **asked)
    assert torch.equal(out.sequences, by_hand(rnn, ids, 10))
    assert len(out.hidden_states) == 10
    assert out.hidden_states[-1][0].shape == (2, 1, 48)


def test_hooks_of_a_model_run_once_for_each_forward_pass(model: PreTrainedModel) -> None:
    rnn, widths = msrnn.MultiStateRNN(model, "tova", 9), []
    hook = model.register_forward_hook(lambda _, __, out: widths.append(out.logits.shape[1]))
    rnn.generate(tokens(1, 20), **greedy(max_new_tokens=4))
    hook.remove()
    assert widths == [1, 1, 1, 1]
