"""What a state takes is known before it is allocated, and refused where it does not fit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tiny import FAMILIES, build, llama, tokens

import msrnn
from msrnn.core.device_memory import available_bytes
from msrnn.core.slots import Slots


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
    with pytest.raises(ValueError, match=r"a state of .* rows takes .* rows fit"):
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
