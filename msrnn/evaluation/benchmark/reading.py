"""The cost of reading one text under policies: perplexity, memory, and the times of prefill and of a decode step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.evaluation.benchmark.timing import Times, milliseconds_in_turns
from msrnn.evaluation.loss import count_most_rows, losses
from msrnn.hf.rnn import MultiStateRNN

PIECE, READINGS = 128, 5  # tokens at the end of the text that are read again, and how often, to time the prefill
UNTIMED, DECODED = 3, 15  # steps; the first ones may move an unbounded state into larger buffers


class Measured(NamedTuple):
    """The cost of reading a text under one policy, and its perplexity."""

    policy: str
    perplexity: float
    rows: int  # KV rows that a head of a layer holds at most
    nbytes: int
    reading: Times  # milliseconds per token of a prefill at the end of the text
    decoding: Times  # milliseconds per decode step at the end of the text

    @property
    def steady(self) -> bool:
        return self.reading.steady and self.decoding.steady


@dataclass
class _Reading:
    """A text that was read under one policy; its end is read again, and continued, to time both."""

    rnn: MultiStateRNN
    perplexity: float
    state: MultiState  # after all tokens but the last one
    before: MultiState  # before `piece`
    piece: Tensor
    last: Tensor
    advance: Callable[[int], None]

    def __post_init__(self) -> None:
        self._decoded = self.state.fork(1)

    def read(self) -> None:
        self.rnn.read(self.piece, self.before.fork(1), last_only=True)
        self.advance(self.piece.shape[1])

    def step(self) -> None:
        self.rnn.step(self.last, self._decoded)

    def describe(self, reading: Times, decoding: Times) -> Measured:
        count, name = self.piece.shape[1], str(self.rnn.spec.fingerprint["policy"])
        per_token = Times(reading.median / count, reading.low / count, reading.high / count, reading.steady)
        return Measured(name, self.perplexity, count_most_rows(self.state), self.state.nbytes, per_token, decoding)


def measure(
    rnns: Sequence[MultiStateRNN], ids: Tensor, advances: Sequence[Callable[[int], None]]
) -> tuple[list[Measured], list[MultiState]]:
    """Read ids [1, T] except the last one under each policy; the states that are returned continue with it.

    advances  called with the number of tokens that were read since, those of repeated readings too; one of each policy
    """
    readings = [_read(rnn, ids.to(rnn.model.device), advance) for rnn, advance in zip(rnns, advances, strict=True)]
    device = rnns[0].model.device
    prefills = milliseconds_in_turns([each.read for each in readings], device, READINGS, warm_ups=1)
    steps = milliseconds_in_turns([each.step for each in readings], device, DECODED, warm_ups=UNTIMED)
    rows = [each.describe(*times) for each, *times in zip(readings, prefills, steps, strict=True)]
    return rows, [each.state for each in readings]


def _read(rnn: MultiStateRNN, ids: Tensor, advance: Callable[[int], None]) -> _Reading:
    state = rnn.state()
    cut = max(0, ids.shape[1] - 1 - PIECE)
    parts = [losses(rnn, ids[:, : cut + 1], state, advance)] if cut else []
    before = state.fork(1)
    parts.append(losses(rnn, ids[:, cut:], state, advance))
    perplexity = math.exp(torch.cat(parts, dim=1).double().mean().item())
    return _Reading(rnn, perplexity, state, before, ids[:, cut:-1], ids[:, -1:], advance)


def tokens_of(length: int) -> int:
    """Tokens that `measure` reads under each policy, of a text of this length, if its times agree at once."""
    return length - 1 + (1 + READINGS) * min(PIECE, length - 1)


def estimate_seconds(rnn: MultiStateRNN, ids: Tensor) -> float:
    """About how long `measure` takes for a policy, from a short prefill. Also compiles the loops of numba."""
    losses(rnn, ids[:, :3], rnn.state())
    piece = ids[:, :PIECE].to(rnn.model.device)
    started = perf_counter()
    logits = rnn.read(piece, rnn.state(), last_only=True)
    logits.tolist()  # waits for the device
    return (perf_counter() - started) / piece.shape[1] * tokens_of(ids.shape[1])
