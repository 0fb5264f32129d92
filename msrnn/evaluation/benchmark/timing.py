"""Time work in milliseconds, and the floor of a decode step: the least time that the hardware allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from msrnn.hf.cuda_graphs import capturing

BUFFER_BYTES = {"cuda": 2**33, "cpu": 2**29}  # far more than a hardware cache holds
ROUNDS, DISAGREE = 3, 0.1  # most rounds; the spread above which a round is repeated


class Times(NamedTuple):
    """Milliseconds of work that was run many times."""

    median: float
    low: float  # the fastest run
    high: float  # the slowest
    steady: bool = True  # the middle half of the runs lies within a tenth of the median


def milliseconds(
    work: Callable[[], object],
    device: torch.device,
    repeats: int = 20,
    warm_ups: int = 3,
    least: int = 5,
    patience: float = 3.0,
) -> Times:
    """Time `repeats` runs after `warm_ups`; after `patience` seconds, only `least` of them.

    Where the runs differ much, as on a busy machine, they are repeated, in three rounds at most. The median is that of
    the steadiest round, the range is that of all rounds.
    """
    for _ in range(warm_ups):
        _once(work, device)
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS and not any(map(_steady, rounds)):
        rounds.append(_round(work, device, repeats, least, patience))
    best, every = min(rounds, key=_spread), [ms for some in rounds for ms in some]
    return Times(float(median(best)), min(every), max(every), _steady(best))


def busy_remark(unsteady: Sequence[str]) -> str:
    """What to tell about times that are not steady, by the names of what was timed."""
    return f"Runs of {', '.join(unsteady)} still differ by more than a tenth after three rounds: the machine is busy."


def _round(work: Callable[[], object], device: torch.device, repeats: int, least: int, patience: float) -> list[float]:
    began = time.perf_counter()
    times: list[float] = []
    for _ in range(repeats):
        times.append(_once(work, device))
        if len(times) >= least and time.perf_counter() - began > patience:
            break
    return times


def _spread(times: list[float]) -> float:
    """The width of the middle half of the runs, as a share of the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def _steady(times: list[float]) -> bool:
    return _spread(times) <= DISAGREE


def _once(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - began)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(stop))


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work as the replay of a CUDA graph; the work itself on other devices."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, device):
        work()
    return graph.replay


@dataclass(frozen=True)
class Floor:
    """The least time of a decode step.

    It reads every state once. It also reads the weights, or multiplies with them, whichever takes longer.
    """

    bandwidth: float  # bytes per millisecond
    weights: int  # bytes that every step reads

    def milliseconds(self, state_bytes: float, products: float) -> float:
        return state_bytes / self.bandwidth + max(self.weights / self.bandwidth, products)


def bandwidth(device: torch.device) -> float:
    """Bytes read per millisecond from a buffer far larger than the cache: the fastest of many tries.

    A floor must not be too high, so the fastest of four ways counts: two sums, a copy, a product.
    """
    size = BUFFER_BYTES["cuda" if device.type == "cuda" else "cpu"]
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    one, other = buffer.chunk(2)
    rows, vector = buffer.view(-1, 2**12), buffer[: 2**12]
    tries = buffer.sum, buffer.view(torch.int32).sum, lambda: one.copy_(other), lambda: rows @ vector
    return buffer.nbytes / min(_once(work, device) for work in tries for _ in range(20))


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights but the embeddings, unless they are tied to the output matrix."""
    table = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    tied = output is not None and output.weight is table
    return sum(p.nbytes for p in model.parameters() if tied or p is not table)


@torch.no_grad()
def products(model: PreTrainedModel, batch: int) -> float:
    """Milliseconds of a step's matrix products: every nn.Linear once. The fastest run, since it is a floor."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    weights = {(m.in_features, m.weight.dtype, m.weight.device) for m in linears}
    inputs = {(n, dtype, device): torch.randn(batch, n, dtype=dtype, device=device) for n, dtype, device in weights}

    def work() -> None:
        for linear in linears:
            linear(inputs[linear.in_features, linear.weight.dtype, linear.weight.device])

    return milliseconds(captured(work, model.device), model.device).low
