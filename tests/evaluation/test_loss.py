from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from msrnn.evaluation.loss import losses
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.tiny import VOCABULARY, build, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


@pytest.mark.parametrize("logits", [5, 3 * 15], ids=["less than a block", "two blocks"])
def test_losses_are_the_same_however_they_are_cut(
    logits: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, blocks = tokens(3, 50), list[int]()
    whole = losses(MultiStateRNN(model, "tova", 8), ids, MultiStateRNN(model, "tova", 8).state(3))
    assert (whole.shape, whole.dtype) == ((3, 49), torch.float32)
    monkeypatch.setattr("msrnn.evaluation.loss.LOGIT_BYTES", {"cpu": VOCABULARY * 4 * logits})
    rnn = MultiStateRNN(model, "tova", 8, block=7)
    assert torch.allclose(losses(rnn, ids, rnn.state(3), blocks.append), whole, atol=1e-4)
    assert blocks == [7] * 7


@pytest.mark.parametrize("reading", [None, 3])
def test_tokens_recall_the_same_however_they_are_cut(
    reading: int | None, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of `recall_while_reading` tokens, or of `recall_every`."""
    ids = tokens(2, 50)
    rnn = MultiStateRNN(model, "tova", 8, recall=4, recall_every=5, recall_while_reading=reading, block=7)
    logits = rnn.read(ids[:, :-1], rnn.state(2), recall_every=reading or 5)
    expected = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    monkeypatch.setattr("msrnn.evaluation.loss.LOGIT_BYTES", {"cpu": VOCABULARY * 4 * 5})
    assert torch.allclose(losses(rnn, ids, rnn.state(2)), expected, atol=1e-4)
