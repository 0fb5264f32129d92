from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import msrnn
from msrnn.hf.captured_graph import layers_share_code
from tests.helpers.tiny import build, llama, tokens


@pytest.mark.gpu
def test_a_fused_step_is_the_step() -> None:
    model = build(llama(num_hidden_layers=12, eos_token_id=None), "cuda")
    fused, plain = msrnn.MultiStateRNN(model, "tova", 9, compile=True), msrnn.MultiStateRNN(model, "tova", 9)
    for batch in (1, 3):
        mine, theirs = fused.state(batch), plain.state(batch)
        for token in tokens(batch, 15).split(1, dim=1):
            torch.testing.assert_close(fused.step(token, mine), plain.step(token, theirs), atol=1e-4, rtol=1e-4)
        assert fused._graphs.of(mine) is not None


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:this model cannot be captured")
def test_old_graphs_and_pinned_memory_are_not_freed_during_a_capture() -> None:
    model, before = build(llama(), "cuda"), gc.get_threshold()
    gc.set_threshold(20, 1, 1)  # garbage is collected all the time
    try:
        for _ in range(10):
            rnn = msrnn.MultiStateRNN(model, "tova", 9)
            state = rnn.state()
            rnn.step(tokens(1, 1), state)
            assert rnn._graphs.of(state) is not None
            cycle: list[Any] = [rnn, state, torch.zeros(8).pin_memory()]
            cycle.append(cycle)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)


def test_layers_share_compiled_code_only_meanwhile() -> None:
    before = torch._dynamo.config.allow_unspec_int_on_nn_module
    with layers_share_code():
        assert torch._dynamo.config.allow_unspec_int_on_nn_module
    assert torch._dynamo.config.allow_unspec_int_on_nn_module == before
