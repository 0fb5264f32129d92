"""Where sequences end: a state reads what was returned, and no filling after its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import msrnn
from tests.helpers.tiny import build, greedy, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


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


def test_a_state_reads_all_that_was_returned_when_nothing_ends_it() -> None:
    """eos_token_id=None in the call is a value, not the lack of one."""
    model = build(llama())
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    always_eos = LogitsProcessorList(
        [lambda _, scores: torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([2]), 0.0)]
    )
    state = rnn.state()
    out = rnn.generate(tokens(1, 20), state=state, eos_token_id=None, logits_processor=always_eos, **greedy())
    assert out.shape == (1, 30)
    assert state.seen.tolist() == [30]


def test_a_pad_that_was_generated_is_read() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 9)

    def pads(_: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([0]), 0.0)

    state = rnn.state(2)
    asked = greedy(eos_token_id=2, pad_token_id=0, logits_processor=LogitsProcessorList([pads]))
    out = rnn.generate(tokens(2, 20), state=state, **asked)
    assert out[:, 20:].tolist() == [[0] * 10] * 2
    assert state.seen.tolist() == [30, 30]


@pytest.mark.parametrize("eos", [2, None])
def test_beams_of_a_batch_read_no_filling(model: PreTrainedModel, eos: int | None) -> None:
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(3, 20)
    asked = greedy(num_beams=3, eos_token_id=eos, pad_token_id=0, stopping_criteria=StoppingCriteriaList([Fourths()]))
    state = rnn.state(3)
    together = rnn.generate(ids, state=state, **asked)
    seen = []
    for i, row in enumerate(ids):
        alone = rnn.state()
        out = rnn.generate(row[None], state=alone, **asked)
        assert torch.equal(together[i, : out.shape[1]], out[0])
        seen += alone.seen.tolist()
        expected = rnn.state()
        rnn.read(out, expected)
        assert alone.seen.tolist() == expected.seen.tolist() == [out.shape[1]]
    assert state.seen.tolist() == seen
    assert len(set(seen)) > 1
