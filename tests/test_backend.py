from __future__ import annotations

import pytest
import torch
from tiny import build, llama, tokens

import msrnn
from msrnn.backend import choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_is_the_fastest_there_is() -> None:
    assert choose("auto", CPU) == "compiled"
    assert choose("auto", CUDA) == "triton"


def test_falling_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.backend._has_triton", lambda: False)
    with pytest.warns(UserWarning, match=r"msrnn\[triton\]"):
        assert choose("auto", CUDA) == "torch"
    with pytest.raises(ValueError, match=r"msrnn\[triton\]"):
        choose("triton", CUDA)


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'numba'"):
        choose("numba", CPU)
    with pytest.raises(ValueError, match="CPU"):
        choose("compiled", CUDA)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="GPU"):
        choose("triton", CPU)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_backend_decodes_alike(backend: str, device: str) -> None:
    model = build(llama(eos_token_id=None), device)
    ids = tokens(2, 12)
    settings = {"max_new_tokens": 4, "do_sample": False}
    expected = msrnn.MultiStateRNN(model, "h2o", 6, backend="torch").generate(ids, **settings)
    rnn = msrnn.MultiStateRNN(model, "h2o", 6, backend=backend)
    assert rnn.plan.backends == [backend] * 2
    assert torch.equal(rnn.generate(ids, **settings), expected)
