"""What reading a text costs and what it gives, for one model under one policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from msrnn.cli.terminal import states_held
from msrnn.core.state import MultiState
from msrnn.evaluation.loss import losses
from msrnn.hf.rnn import MultiStateRNN

UNTIMED, DECODED = 3, 32  # an unbounded state may first have to move into larger buffers


class Measured(NamedTuple):
    policy: str
    perplexity: float
    states: int
    nbytes: int
    reading: float  # seconds per token
    decoding: float


def measure(rnn: MultiStateRNN, ids: Tensor, advance: Callable[[int], None]) -> tuple[Measured, MultiState]:
    """Read ids [1, T] but for the last, which the returned state has still to read."""
    ids = ids.to(rnn.model.device)
    losses(rnn, ids[:, :3], rnn.state())  # loops are compiled before they are timed
    state = rnn.state()
    started = perf_counter()
    loss = losses(rnn, ids, state, advance).double().sum().item()
    reading = (perf_counter() - started) / (ids.shape[1] - 1)
    perplexity = math.exp(loss / (ids.shape[1] - 1))
    times = reading, _decode(rnn, ids[:, -1:], state.fork(1))
    return Measured(str(rnn.spec.fingerprint["policy"]), perplexity, states_held(state), state.nbytes, *times), state


def _decode(rnn: MultiStateRNN, token: Tensor, state: MultiState) -> float:
    """Seconds per token."""
    started = 0.0
    for step in range(UNTIMED + DECODED):
        if step == UNTIMED:
            token.tolist()  # waits for the device
            started = perf_counter()
        token = rnn.step(token, state).argmax(-1)
    token.tolist()
    return (perf_counter() - started) / DECODED
