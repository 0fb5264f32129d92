from __future__ import annotations

import pytest
import torch

import msrnn
from msrnn.backends import resolve_backend
from tests.helpers.tiny import build, llama, tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_is_the_fastest_there_is() -> None:
    assert resolve_backend("auto", CPU).name == "numba"
    assert resolve_backend("auto", CUDA).name == "triton"


def test_falling_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.backends._has_triton", lambda: False)
    with pytest.warns(UserWarning, match=r"msrnn\[triton\]"):
        assert resolve_backend("auto", CUDA).name == "torch"
    with pytest.raises(ValueError, match=r"msrnn\[triton\]"):
        resolve_backend("triton", CUDA)


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'cython'"):
        resolve_backend("cython", CPU)
    with pytest.raises(ValueError, match="CPU"):
        resolve_backend("numba", CUDA)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="GPU"):
        resolve_backend("triton", CPU)


@pytest.mark.parametrize(
    ("backend", "device"),
    [("numba", "cpu"), ("triton", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.gpu)],
)
def test_every_backend_decodes_as_torch_does(backend: str, device: str) -> None:
    if torch.cuda.is_available() and (backend, device) == ("triton", "cpu"):
        pytest.skip("triton's interpreter is for machines without a GPU")
    model, ids = build(llama(2, 1, hidden_size=16), device), tokens(1, 4)  # few, since triton's interpreter is slow
    plain, kernels = (msrnn.MultiStateRNN(model, "h2o", 3, backend=name) for name in ("torch", backend))
    assert (plain.spec.backends, kernels.spec.backends) == (["torch"] * 2, [backend] * 2)
    theirs, mine = plain.state(), kernels.state()
    plain.read(ids, theirs)
    kernels.read(ids, mine)
    for token in tokens(1, 2, seed=2).split(1, dim=1):
        torch.testing.assert_close(kernels.step(token, mine), plain.step(token, theirs), atol=1e-4, rtol=1e-4)
    for layer in range(2):
        assert torch.equal(mine.positions(layer).sort(-1).values, theirs.positions(layer).sort(-1).values)
