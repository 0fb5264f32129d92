"""What a state takes is known before it is allocated, and refused where it does not fit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import msrnn
from msrnn.core.device_memory import available_bytes, if_it_fits, is_out_of_memory
from msrnn.core.slots import Slots
from tests.helpers.tiny import FAMILIES, build, llama, tokens


@pytest.mark.parametrize("policy", ["tova", "h2o", "echo", "window+4", "tova-head"])
@pytest.mark.parametrize("state_dtype", [None, "int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_estimate_is_what_a_state_takes(policy: str, state_dtype: str | None, family: str) -> None:
    rnn = msrnn.MultiStateRNN(build(FAMILIES[family]()), policy, 9, state_dtype=state_dtype)
    for rows in (1, 3):
        assert rnn.spec.nbytes(rows) == rnn.state(rows).nbytes


@pytest.mark.parametrize("size", [10**11, 10**22])
def test_a_state_that_does_not_fit_is_refused_before_it_is_allocated(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slots, "__init__", None)
    model = build(llama())
    with pytest.raises(ValueError, match=rf"a state of size {size} for 1 sequence takes .*GB.* is free on cpu: size "):
        msrnn.MultiStateRNN(model, "tova", size).state()
    cache = msrnn.MultiStateCache(model, "tova", size)
    with torch.no_grad(), pytest.raises(ValueError, match=r"takes .*GB"):
        model(tokens(1, 4), past_key_values=cache)


def test_what_would_fit_fits() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 64)
    free = available_bytes(torch.device("cpu"))
    assert free is not None
    rows = 10 * free // rnn.spec.nbytes(1)
    with pytest.raises(ValueError, match=r"for \d+ sequences takes .*: [\d,]+ sequences fit"):
        rnn.state(rows)
    state = rnn.state(2)
    with pytest.raises(ValueError, match=r"a state of .* sequences takes .* sequences fit"):
        state.fork(rows)


LIMITED = """
import resource, sys
import torch
from msrnn.core.device_memory import available_bytes
from msrnn.core.slots import Slots
before = available_bytes(torch.device("cpu"))
pages = int(open("/proc/self/statm").read().split()[0])
used = pages * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
limited = available_bytes(torch.device("cpu"))
assert before is not None and limited is not None
assert 2**27 < limited <= 2**28 < before, (before, limited)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are read from /proc")
def test_the_limit_of_the_process_counts() -> None:
    subprocess.run([sys.executable, "-c", LIMITED], check=True)


def test_other_errors_are_no_lack_of_memory() -> None:
    def broken() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        if_it_fits(broken)


def test_a_failed_capture_names_memory_as_its_reason() -> None:
    error = RuntimeError("the capture was invalidated")
    error.__context__ = torch.cuda.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(error)
    assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("unable to mmap 8 bytes from file <weights>: Cannot allocate memory (12)"))
    assert is_out_of_memory(RuntimeError("Storage size calculation overflowed with sizes=[1, 2, 1000000000000000001]"))
    assert not is_out_of_memory(RuntimeError("the capture was invalidated"))
