"""What reading one text costs under a policy: perplexity, memory, and the times of prefill and of a decode step."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.evaluation.benchmark.timing import Times, milliseconds
from msrnn.evaluation.loss import losses, states_held
from msrnn.hf.rnn import MultiStateRNN

PIECE, READINGS = 128, 5  # tokens at the end of the text that are read again, and how often, to time the prefill
UNTIMED, DECODED = 3, 15  # steps; the first ones may move an unbounded state into larger buffers


class Measured(NamedTuple):
    """What reading a text costs under one policy, and its perplexity."""

    policy: str
    perplexity: float
    states: int
    nbytes: int
    reading: Times  # milliseconds per token of a prefill at the end of the text
    decoding: Times  # milliseconds per decode step at the end of the text

    @property
    def steady(self) -> bool:
        return self.reading.steady and self.decoding.steady


def measure(rnn: MultiStateRNN, ids: Tensor, advance: Callable[[int], None]) -> tuple[Measured, MultiState]:
    """Read ids [1, T] except the last one; the state that is returned continues with it.

    advance  called with the number of tokens that were read since, those of repeated readings too
    """
    ids, device = ids.to(rnn.model.device), rnn.model.device
    state = rnn.state()
    cut = max(0, ids.shape[1] - 1 - PIECE)
    parts = [losses(rnn, ids[:, : cut + 1], state, advance)] if cut else []
    before, piece = state.fork(1), ids[:, cut:-1]
    parts.append(losses(rnn, ids[:, cut:], state, advance))
    perplexity = math.exp(torch.cat(parts, dim=1).double().mean().item())

    def read() -> None:
        rnn.read(piece, before.fork(1), last_only=True)
        advance(piece.shape[1])

    reading = milliseconds(read, device, READINGS, warm_ups=1)
    count = piece.shape[1]
    per_token = Times(reading.median / count, reading.low / count, reading.high / count, reading.steady)
    decoded = state.fork(1)
    decoding = milliseconds(lambda: rnn.step(ids[:, -1:], decoded), device, DECODED, warm_ups=UNTIMED)
    name = str(rnn.spec.fingerprint["policy"])
    return Measured(name, perplexity, states_held(state), state.nbytes, per_token, decoding), state


def tokens_of(length: int) -> int:
    """Tokens that `measure` reads of a text of this length, if its times agree at once."""
    return length - 1 + (1 + READINGS) * min(PIECE, length - 1)


def estimate_seconds(rnn: MultiStateRNN, ids: Tensor) -> float:
    """About how long `measure` takes on this machine, from a short prefill. Also compiles the loops of numba."""
    losses(rnn, ids[:, :3], rnn.state())
    piece = ids[:, :PIECE].to(rnn.model.device)
    started = perf_counter()
    logits = rnn.read(piece, rnn.state(), last_only=True)
    logits.tolist()  # waits for the device
    return (perf_counter() - started) / piece.shape[1] * tokens_of(ids.shape[1])
