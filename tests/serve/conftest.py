"""One server for all tests of a file, in both orders of steps; a tiny model answers, with a real tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import running
from step_orders import use_order
from tiny import build, llama

import msrnn
from msrnn.hf.loading import Loaded


@pytest.fixture(scope="module", autouse=True, params=[False, True], ids=["in-order", "overlapping"])
def overlaps(request: pytest.FixtureRequest) -> Iterator[bool]:
    with pytest.MonkeyPatch.context() as patch:
        use_order(patch, request.param)
        yield request.param


@pytest.fixture(scope="module")
def rnn(small: Loaded) -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(vocab_size=len(small.tokenizer), eos_token_id=None), "cpu"), "tova", 16)


@pytest.fixture(scope="module")
def engine(rnn: msrnn.MultiStateRNN, small: Loaded, overlaps: bool) -> msrnn.Engine:
    return msrnn.Engine(rnn, rows=4, tokenizer=small.tokenizer)


@pytest.fixture(scope="module")
def address(engine: msrnn.Engine) -> Iterator[str]:
    with running(engine) as found:
        yield found
