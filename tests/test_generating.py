from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import build, greedy, llama, tokens
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

import msrnn


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
    beams = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 8}
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


def test_assisted_decoding_is_refused(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    with pytest.raises(ValueError, match="assistant_model"):
        rnn.generate(tokens(1, 3), assistant_model=model)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
        rnn.generate(tokens(1, 3), prompt_lookup_num_tokens=3)


class Fourths(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return input_ids[:, -1] % 4 == 0


@pytest.mark.parametrize("pad", [0, 2])
def test_a_row_that_a_criterion_ended_reads_no_filling(model: PreTrainedModel, pad: int) -> None:
    """Rows are filled up with what may be an eos, and none of them said it."""
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(3, 20)
    asked = greedy(eos_token_id=2, pad_token_id=pad, stopping_criteria=StoppingCriteriaList([Fourths()]))
    state = rnn.state(3)
    rnn.generate(ids, state=state, **asked)
    seen = []
    for row in ids:
        alone = rnn.state()
        rnn.generate(row[None], state=alone, **asked)
        seen += alone.seen.tolist()
    assert state.seen.tolist() == seen
    assert len(set(seen)) > 1
