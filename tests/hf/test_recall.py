"""Recall of a whole model: its two ends, batches, generation, and states that are saved, forked and selected."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import msrnn
from msrnn.core import paged_slots
from msrnn.recall import Recall
from tests.helpers.tiny import FAMILIES, build, greedy, left_padded, llama

LENGTH = 70


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(4, 2))


@pytest.fixture(scope="module")
def ids(model: PreTrainedModel) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def test_enough_guests_are_the_full_model(model: PreTrainedModel, ids: Tensor) -> None:
    full = msrnn.MultiStateRNN(model, "full", None)
    expected = full.read(ids, full.state(2))
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=LENGTH)
    state = rnn.state(2)
    found = rnn.read(ids[:, :50], state, recall_every=1)
    steps = [rnn.step(ids[:, t : t + 1], state) for t in range(50, LENGTH)]
    torch.testing.assert_close(torch.cat([found, *steps], 1), expected, atol=1e-4, rtol=1e-4)


def test_without_recall_a_state_with_an_archive_is_the_bounded_model(model: PreTrainedModel, ids: Tensor) -> None:
    bounded, rnn = (msrnn.MultiStateRNN(model, "echo", 16, recall=recall) for recall in (0, 8))
    assert torch.equal(bounded.read(ids, bounded.state(2)), rnn.read(ids, rnn.state(2)))


def test_a_batch_is_its_sequences(model: PreTrainedModel, ids: Tensor) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6, recall_every=4)
    padded, mask = left_padded(ids, [0, 9])
    state = rnn.state(2)
    rnn.read(padded[:, :40], state, mask[:, :40])
    both = rnn.read(padded[:, 40:60], state, mask[:, 40:60], recall_every=4)
    steps = torch.cat([both, *(rnn.step(padded[:, t : t + 1], state) for t in range(60, LENGTH))], 1)
    for row, start in enumerate((0, 9)):
        alone = rnn.state()
        rnn.read(ids[row : row + 1, start:40], alone)
        logits = [rnn.read(ids[row : row + 1, 40:60], alone, recall_every=4)]
        logits += [rnn.step(ids[row : row + 1, t : t + 1], alone) for t in range(60, LENGTH)]
        torch.testing.assert_close(torch.cat(logits, 1)[0], steps[row], atol=1e-5, rtol=1e-5)


def test_reading_does_not_depend_on_forward_passes(model: PreTrainedModel, ids: Tensor) -> None:
    found = []
    for block in (None, 5):
        rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6, block=block)
        state = rnn.state()
        rnn.read(ids[:1, :21], state)
        found.append(rnn.read(ids[:1, 21:], state, recall_every=8))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("place", ["host", "device", "folder"])
def test_generation_recalls_the_same_wherever_the_archive_is(
    model: PreTrainedModel, ids: Tensor, place: str, tmp_path: Path
) -> None:
    recall = Recall(6, archive=str(tmp_path / "archive") if place == "folder" else place)
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=recall)
    state = rnn.state()
    rnn.read(ids[:1], state)
    answer = rnn.generate(ids[:1, :5], state, **greedy(eos_token_id=None))
    assert torch.equal(answer, answer_by_steps(model, ids))
    assert state.seen.item() == LENGTH + 15
    if place == "folder":
        assert list((tmp_path / "archive").iterdir()) == []


def answer_by_steps(model: PreTrainedModel, ids: Tensor) -> Tensor:
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6)
    state = rnn.state()
    rnn.read(ids[:1], state)
    logits, answer = rnn.read(ids[:1, :5], state, recall_every=1), ids[:1, :5]
    for _ in range(10):
        token = logits[:, -1:].argmax(-1)
        answer = torch.cat([answer, token], 1)
        logits = rnn.step(token, state)
    return answer


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_a_saved_state_has_its_archive(model: PreTrainedModel, ids: Tensor, tmp_path: Path, state_dtype: Any) -> None:
    rnn = msrnn.MultiStateRNN(model, "echo", 16, recall=6, state_dtype=state_dtype)
    state = rnn.state(2)
    rnn.read(ids[:, :50], state)
    state.save(tmp_path / "state.safetensors")
    loaded = rnn.load_state(tmp_path / "state.safetensors")
    both = [rnn.read(ids[:, 50:], one, recall_every=1) for one in (state, loaded)]
    assert torch.equal(*both)


def test_forks_share_the_archive_and_continue_on_their_own(model: PreTrainedModel, ids: Tensor) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6)
    state = rnn.state()
    rnn.read(ids[:1, :40], state)
    fork, chosen = state.fork(1), state.select([0])
    cat = msrnn.MultiState.cat([state, fork])
    first = rnn.read(ids[:1, 40:], state, recall_every=1)
    other = rnn.read(ids[1:, 40:], fork, recall_every=1)
    assert torch.equal(first, rnn.read(ids[:1, 40:], chosen, recall_every=1))
    together = rnn.read(torch.cat([ids[:1, 40:], ids[1:, 40:]]), cat, recall_every=1)
    torch.testing.assert_close(together, torch.cat([first, other]), atol=1e-5, rtol=1e-5)


def test_another_number_of_guests_or_none_is_refused(model: PreTrainedModel, ids: Tensor, tmp_path: Path) -> None:
    rnn, bounded, more = (msrnn.MultiStateRNN(model, "tova", 16, recall=recall) for recall in (6, 0, 8))
    state = rnn.state()
    rnn.read(ids[:1, :30], state)
    state.save(tmp_path / "state")
    for other in (bounded, more):
        with pytest.raises(msrnn.UsageError, match="recall"):
            other.load_state(tmp_path / "state")
        with pytest.raises(msrnn.UsageError, match="recall"):
            other.read(ids[:1, 30:], state)
    with pytest.raises(msrnn.UsageError, match="archives nothing"):
        bounded.read(ids[:1], bounded.state(), recall_every=1)


def test_searches_of_forks_see_no_tokens_of_each_other(model: PreTrainedModel, ids: Tensor) -> None:
    """A fork ends inside of a page that another one has continued; then it recalls, before it adds tokens."""
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=Recall(16, search="int8"))
    alone, state = rnn.state(), rnn.state()
    for one in (alone, state):
        rnn.read(ids[:1, :37], one)
    fork = state.fork(1)
    for layer in state.layers:
        layer.archives[0].append(*(torch.full((2, 3, 12), sign * 100.0) for sign in (1, -1)))
    found, expected = (rnn.read(ids[:1, 37:], one, recall_every=8) for one in (fork, alone))
    assert torch.equal(found, expected)


def test_a_cache_that_would_not_recall_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(msrnn.UsageError, match="recall=6"):
        msrnn.MultiStateRNN(model, "tova", 16, recall=6).cache()


def test_all_rows_recalled_are_the_full_model_under_a_horizon(model: PreTrainedModel, ids: Tensor) -> None:
    full = msrnn.MultiStateRNN(model, "full", None)
    rnn = msrnn.MultiStateRNN(model, "tova~20", 16, recall=LENGTH)
    found, expected = rnn.read(ids[:1], rnn.state(), recall_every=1), full.read(ids[:1], full.state())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mistral-sliding", "gpt-oss"])
def test_sliding_layers_that_evict_recall_within_their_window(family: str) -> None:
    model = build(FAMILIES[family]())
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    full = msrnn.MultiStateRNN(model, "full", None)
    rnn = msrnn.MultiStateRNN(model, "tova", 6, recall=LENGTH)
    found, expected = rnn.read(ids, rnn.state(), recall_every=1), full.read(ids, full.state())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    blocks = rnn.read(ids, rnn.state(), recall_every=8)
    assert blocks.isfinite().all()


def test_a_read_of_others_leaves_the_guests_of_a_sequence(model: PreTrainedModel, ids: Tensor) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6, recall_every=8)
    state, alone = rnn.state(2), rnn.state()
    rnn.read(ids[:, :41], state, recall_every=8)
    rnn.read(ids[1:, :41], alone, recall_every=8)
    mask = torch.tensor([[1] * 9, [0] * 9])
    rnn.read(ids[:, 41:50], state, mask)
    both = rnn.step(ids[:, 50:51], state)
    torch.testing.assert_close(both[1:], rnn.step(ids[1:, 50:51], alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [{"output_hidden_states": True}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}]
)
def test_generation_in_other_ways(model: PreTrainedModel, ids: Tensor, options: dict[str, Any]) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 8, recall=12)
    prompt = torch.cat([ids[:1], ids[1:]], 1)  # longer than a question
    settings = {**greedy(eos_token_id=None, return_dict_in_generate=True, output_logits=True), **options}
    plain = rnn.generate(prompt, **greedy(eos_token_id=None, return_dict_in_generate=True, output_logits=True))
    other = rnn.generate(prompt, **settings)
    torch.testing.assert_close(other.logits[0][:1], plain.logits[0], atol=1e-4, rtol=1e-4)
    rare = msrnn.MultiStateRNN(model, "tova", 8, recall=12, recall_every=4)
    with pytest.raises(msrnn.UsageError, match="recall_every=1"):
        rare.generate(prompt, **settings)


def test_a_state_after_beams_has_read_the_answer_with_recall(model: PreTrainedModel, ids: Tensor) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 8, recall=12)
    state, other = rnn.state(), rnn.state()
    answer = rnn.generate(ids[:1], state, **greedy(num_beams=2, max_new_tokens=80, eos_token_id=None))
    rnn.read_prompt(ids[:1], other, None)
    rnn.read(answer[:, LENGTH:], other, recall_every=1)
    torch.testing.assert_close(rnn.step(ids[:1, :1], state), rnn.step(ids[:1, :1], other), atol=1e-4, rtol=1e-4)


def test_padding_before_a_question(model: PreTrainedModel, ids: Tensor) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6, recall_while_reading=8)
    long = torch.cat([ids, ids], 1)[:1, :100]
    padded, mask = left_padded(long, [60])
    both = (
        rnn.generate(padded, attention_mask=mask, **greedy())[:, 100:],
        rnn.generate(long[:, 60:], **greedy())[:, 40:],
    )
    assert torch.equal(*both)


def test_a_state_of_inference_mode_continues_outside(model: PreTrainedModel, ids: Tensor) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6)
    state = rnn.state()
    with torch.inference_mode():
        rnn.read(ids[:1, :40], state)
    rnn.read(ids[:1, 40:], state)
    assert state.seen.tolist() == [LENGTH]


def test_copies_of_a_state_are_apart(model: PreTrainedModel, ids: Tensor) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6)
    state = rnn.state()
    rnn.read(ids[:1, :40], state)
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.fork(1)]
    expected = rnn.read(ids[:1, 40:], state, recall_every=1)
    for one in copies:
        assert torch.equal(rnn.read(ids[:1, 40:], one, recall_every=1), expected)


@pytest.mark.slow
def test_states_that_are_searched_in_other_ways(model: PreTrainedModel, ids: Tensor, monkeypatch: Any) -> None:
    """Kernels run in triton's interpreter here."""
    monkeypatch.setattr(paged_slots, "LEAST_SEGMENTS", 1)
    paged, plain = (
        msrnn.MultiStateRNN(model, "tova", 16, recall=Recall(6, search="int8"), backend=backend)
        for backend in ("triton", "torch")
    )
    states = paged.state(), plain.state()
    for rnn, state in zip((paged, plain), states, strict=True):
        rnn.read(ids[:1, :30], state)
    with pytest.raises(msrnn.UsageError, match="convert_state"):
        plain.read(ids[:1, 30:32], states[0])
    with pytest.raises(msrnn.UsageError, match="convert_state"):
        msrnn.MultiState.cat(list(states))
    expected = plain.read(ids[:1, 30:31], states[1].fork(1), recall_every=1)
    for rnn, state in ((plain, states[0]), (paged, states[1])):
        found = rnn.read(ids[:1, 30:31], rnn.convert_state(state), recall_every=1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    twin = copy.deepcopy(states[0])
    for one in (states[0], twin):
        torch.testing.assert_close(paged.read(ids[:1, 30:31], one, recall_every=1), expected, atol=1e-4, rtol=1e-4)


def test_steps_of_kernels_recall_when_it_is_due(model: PreTrainedModel, ids: Tensor, monkeypatch: Any) -> None:
    monkeypatch.setattr(paged_slots, "LEAST_SEGMENTS", 1)
    logits = []
    for backend in ("triton", "torch"):
        rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=Recall(6, every=4, search="int8"), backend=backend)
        state = rnn.state()
        rnn.read(ids[:1, :23], state)
        logits.append(torch.cat([rnn.step(ids[:1, t : t + 1], state) for t in range(23, 26)], 1))  # 24 is due
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
