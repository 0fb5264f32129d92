from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.core.slots import MOST_COLUMNS
from tests.helpers.tiny import FAMILIES, build, greedy, left_padded, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def test_every_row_gets_what_it_gets_alone(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9, chunk=8)
    padding = [0, 5, 17]
    ids, mask = left_padded(tokens(3, 30), padding)
    logits = rnn.read(ids, rnn.state(3), mask)
    together = rnn.generate(ids, attention_mask=mask, **greedy())
    stock = model.generate(ids, attention_mask=mask, past_key_values=msrnn.MultiStateCache(model, size=9), **greedy())
    assert torch.equal(stock, together)
    for row, start in enumerate(padding):
        alone = ids[row : row + 1, start:]
        torch.testing.assert_close(logits[row, start:], rnn.read(alone, rnn.state())[0], atol=1e-5, rtol=1e-4)
        assert torch.equal(together[row, start:], rnn.generate(alone, **greedy())[0])


def test_a_second_rnn_on_the_same_model_does_not_disturb_the_first(model: PreTrainedModel) -> None:
    ids = tokens(1, 30)
    first = msrnn.MultiStateRNN(model, "tova", 9)
    expected = first.read(ids, first.state())
    second = msrnn.MultiStateRNN(model, "window", 5)
    state = first.state()
    parts = []
    for t in range(0, 30, 10):
        parts.append(first.read(ids[:, t : t + 10], state))
        second.read(ids[:, t : t + 10], second.state())
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reads_and_steps_alike(dtype: torch.dtype) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()).to(dtype), "window+1", 9)
    ids = tokens(1, 20)
    read = rnn.read(ids, rnn.state())
    state = rnn.state()
    stepped = torch.cat([rnn.step(ids[:, t : t + 1], state) for t in range(20)], dim=1)
    assert read.dtype == dtype
    torch.testing.assert_close(stepped, read, atol=0.15, rtol=0.05)
    assert sorted(state.positions(0)[0, 0].tolist()) == [-1, 0, *range(12, 20)]


def test_a_model_in_training_mode_is_put_into_evaluation() -> None:
    """GPT-2 has dropout outside attention, too, which only evaluation mode switches off."""
    model, ids = build(FAMILIES["gpt2"]()), tokens(1, 20)
    with torch.no_grad():
        expected = model(ids).logits
        assert not torch.allclose(model.train()(ids).logits, expected, atol=0.1), "dropout changes the logits"
    rnn = msrnn.MultiStateRNN(model, "tova", 20)
    assert not model.training
    torch.testing.assert_close(rnn.read(ids, rnn.state()), expected, atol=1e-4, rtol=1e-4)


def test_a_wrap_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear"):
        msrnn.MultiStateRNN(torch.nn.Linear(2, 2), "tova", 9)


def test_a_batch_goes_on_with_padding_between_turns(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9, chunk=8)
    first, mask = left_padded(tokens(2, 20), [0, 6])
    second, more_mask = left_padded(tokens(2, 12, seed=7), [5, 0])
    state = rnn.state(2)
    rnn.generate(first, state=state, attention_mask=mask, **greedy())
    together = rnn.generate(second, state=state, attention_mask=more_mask, **greedy())
    for row, (a, b) in enumerate([(0, 5), (6, 0)]):
        alone = rnn.state()
        rnn.generate(first[row : row + 1, a:], state=alone, **greedy())
        assert torch.equal(together[row, b:], rnn.generate(second[row : row + 1, b:], state=alone, **greedy())[0])
        assert alone.seen[0] == state.seen[row]


def test_a_cache_ends_where_positions_end(model: PreTrainedModel) -> None:
    cache = msrnn.MultiStateCache(model, "tova", 9)
    with torch.no_grad():
        model(tokens(1, 12), past_key_values=cache)
        cache.state.columns = MOST_COLUMNS - 2
        with pytest.raises(ValueError, match="at most"):
            model(tokens(1, 3), past_key_values=cache)
        model(tokens(1, 2), past_key_values=cache)
    assert cache.get_seq_length() == MOST_COLUMNS


def test_a_state_made_in_inference_mode_is_a_state(model: PreTrainedModel, tmp_path: Path) -> None:
    for policy in ("tova", "echo", "full"):
        rnn = msrnn.MultiStateRNN(model, policy, None if policy == "full" else 9)
        ids = tokens(1, 150)
        expected = rnn.state()
        first, second = rnn.read(ids[:, :100], expected), rnn.read(ids[:, 100:], expected)
        with torch.inference_mode():
            state = rnn.state()
            assert torch.equal(rnn.read(ids[:, :100], state), first)
            forked = state.fork(1)
            state.save(tmp_path / policy)
            loaded = rnn.load_state(tmp_path / policy)
        for other in (state, forked, loaded):
            torch.testing.assert_close(rnn.read(ids[:, 100:], other), second)


def test_what_a_state_tells_is_a_copy(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    seen, positions = state.seen, state.positions(0)
    before = positions.clone()
    rnn.read(tokens(1, 12), state)
    assert seen.tolist() == [12]
    assert torch.equal(positions, before)
    state.positions(0).fill_(-1)
    state.seen.zero_()
    assert state.seen.tolist() == [24]
    assert (state.positions(0) >= 0).sum() == 9
