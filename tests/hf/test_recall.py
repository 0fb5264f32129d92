"""Recall of a whole model: its two ends, batches, generation, and states that are saved, forked and selected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import msrnn
from msrnn.recall import Recall
from tests.helpers.tiny import build, greedy, left_padded, llama

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


def test_a_converted_state_recalls_as_one_of_these_positions(model: PreTrainedModel, ids: Tensor) -> None:
    """Before the first eviction there are no gaps, so both have read the same."""
    original = msrnn.MultiStateRNN(model, "tova", 16, recall=6)
    rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=6, positions="compressed")
    begun, whole = original.state(), rnn.state()
    original.read(ids[:1, :10], begun)
    rnn.read(ids[:1, :10], whole)
    found, expected = (rnn.read(ids[:1, 10:], state, recall_every=8) for state in (rnn.convert_state(begun), whole))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


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
