"""A model that computes NaN for one token: the other rows of a batch are not affected."""

from __future__ import annotations

import pytest
import torch

from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.tiny import build, llama, tokens

BREAKS = 5  # the token whose embedding is NaN
SMALL = {"heads": 2, "kv_heads": 2, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("policy", ["tova", "h2o", "echo+1~6"])
@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
def test_one_broken_row_of_a_batch(backend: str, policy: str, device: str) -> None:
    if device != "cpu" and backend != "triton":
        pytest.skip("these run on a CPU")
    if device == "cpu" and backend == "triton":
        pytest.skip("half a minute in triton's interpreter: this one runs on a GPU")
    model = build(llama(**SMALL), device)
    with torch.no_grad():
        model.get_input_embeddings().weight[BREAKS] = torch.nan
    rnn = MultiStateRNN(model, policy, 4, backend=backend)
    ids = tokens(4, 8).to(device)
    ids[ids == BREAKS] += 1
    broken = ids.clone()
    broken[1, 2], broken[3, 6] = BREAKS, BREAKS  # while reading, and while stepping
    logits, positions = [], []
    for given in (broken, ids):
        state = rnn.state(4)
        read = rnn.read(given[:, :5], state)
        logits.append(torch.cat([read, *(rnn.step(given[:, i : i + 1], state) for i in range(5, 8))], dim=1))
        positions.append([state.positions(layer).sort(-1).values for layer in range(2)])
    assert torch.equal(logits[0][[0, 2]], logits[1][[0, 2]])
    assert torch.equal(logits[0][3, :6], logits[1][3, :6])
    assert not logits[0][1, 2].isfinite().any()
    assert not logits[0][3, 6].isfinite().any()
    for broke, sound in zip(positions[0], positions[1], strict=True):
        assert torch.equal(broke[[0, 2]], sound[[0, 2]])
        assert (broke[..., 1:].diff(dim=-1) > 0).all()
        assert (broke[..., 0] == -1).all()
        assert broke.max() < 8


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_state_that_held_nan_is_clean_after_a_reset(backend: str) -> None:
    model = build(llama(**SMALL))
    with torch.no_grad():
        model.get_input_embeddings().weight[BREAKS] = torch.nan
    rnn = MultiStateRNN(model, "echo", 6, backend=backend)
    ids = tokens(2, 12)
    ids[ids == BREAKS] += 1
    broken = ids.clone()
    broken[:, 8:] = BREAKS
    state = rnn.state(2)
    rnn.read(broken, state)
    state.reset()
    assert torch.equal(rnn.read(ids, state), rnn.read(ids, rnn.state(2)))
