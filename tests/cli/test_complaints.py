"""What went wrong below the verbs, and is one line all the same."""

from __future__ import annotations

import re

import pytest
import torch
from command import Run


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 bytes.\nSee documentation"),
        MemoryError(),
    ],
    ids=["cpu", "cuda", "python"],
)
def test_out_of_memory_is_one_line(error: Exception, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(*_: object) -> None:
        raise error

    monkeypatch.setattr("msrnn.hf.rnn.MultiStateRNN.state", state)
    code, out, err = run("generate", "hi")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("msrnn: out of memory")
    assert "--size" in err
    assert "--batch" in err


def test_more_states_than_there_is_memory(run: Run) -> None:
    code, _, err = run("generate", "hi", "--size", 10**18, "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(r"a state of size 10{18} for 1 sequence takes .* GB, and .* is free on cpu: size [\d,]+ fits", err)


def test_other_errors_are_not_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("msrnn.hf.rnn.MultiStateRNN.state", state)
    with pytest.raises(RuntimeError, match="shapes"):
        run("generate", "hi")


def test_a_device_that_torch_knows_and_msrnn_does_not(run: Run) -> None:
    code, out, err = run("generate", "hi", "--device", "mps")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--device mps: must be" in err
