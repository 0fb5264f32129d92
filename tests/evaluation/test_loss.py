from __future__ import annotations

import math

import pytest
import torch
from tiny import VOCABULARY, build, llama, tokens
from transformers import PreTrainedModel

from msrnn.evaluation.loss import losses, measure
from msrnn.hf.rnn import MultiStateRNN


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


def test_a_measurement(model: PreTrainedModel) -> None:
    ids, read = tokens(1, 20), list[int]()
    rnn = MultiStateRNN(model, "tova", 8)
    found, state = measure(rnn, ids, read.append)
    assert found.perplexity == pytest.approx(math.exp(losses(rnn, ids, rnn.state()).mean().item()), rel=1e-5)
    assert (found.policy, found.states, found.nbytes) == ("tova", 8, state.nbytes)
    assert (sum(read), state.seen.tolist()) == (19, [19])
