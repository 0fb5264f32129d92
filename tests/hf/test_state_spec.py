"""The layout of states: options are checked before any work, and the default dtype does not matter."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from tests.helpers.tiny import build, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def test_arguments_are_checked_before_any_work(model: PreTrainedModel, passes: list[torch.nn.Module]) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    rnn.read(tokens(1, 1), state)
    assert passes, "work would be noticed"
    passes.clear()
    with pytest.raises(ValueError, match="batch_size=0"):
        rnn.state(0)
    with pytest.raises(ValueError, match="one token per sequence"):
        rnn.step(tokens(1, 2), state)
    for read in (rnn.read, rnn.step):
        with pytest.raises(TypeError, match="dict"):
            read(tokens(1, 1), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="left"):
        rnn.generate(tokens(1, 3), state=state, attention_mask=torch.tensor([[1, 1, 0]]))
    with pytest.raises(ValueError, match="num_return_sequences=2"):
        rnn.generate(tokens(1, 3), state=state, num_return_sequences=2, do_sample=True)
    assert passes == []
    assert state.seen.tolist() == [1]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_the_default_dtype_does_not_matter(backend: str) -> None:
    model, ids = build(llama()), tokens(1, 30)
    for policy, positions in (("echo", "original"), ("h2o", "compressed")):
        rnn = msrnn.MultiStateRNN(model, policy, 8, backend=backend, positions=positions)
        expected = rnn.read(ids, rnn.state())
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = rnn.read(ids, rnn.state())
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_autocast_is_refused_before_anything_is_read(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"autocast computes in torch\.bfloat16"),
    ):
        rnn.read(tokens(1, 12), state)
    assert state.seen.tolist() == [0]
    assert rnn.read(tokens(1, 12), state).isfinite().all()
