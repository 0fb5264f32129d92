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

from msrnn.evaluation.benchmark.other_processes import OtherProcesses
from msrnn.hf.captured_graph import capturing

BUFFER_BYTES = {"cuda": 2**33, "cpu": 2**29}  # far more than a hardware cache holds
ROUNDS, DISAGREE = 3, 0.1  # most rounds; the spread above which a round is repeated


class Times(NamedTuple):
    """Milliseconds of work that was run many times."""

    median: float
    low: float  # the fastest run
    high: float  # the slowest
    steady: bool = True  # the middle half of the runs lies within a tenth of the median, and no process disturbed them


class _Round(NamedTuple):
    """Milliseconds of runs [work][repeat], and whether other processes took processors meanwhile."""

    times: list[list[float]]
    disturbed: bool

    @property
    def spread(self) -> float:
        return max(map(_spread, self.times))

    @property
    def steady(self) -> bool:
        return not self.disturbed and self.spread <= DISAGREE


def milliseconds(
    work: Callable[[], object],
    device: torch.device,
    repeats: int = 20,
    warm_ups: int = 3,
    least: int = 5,
    patience: float = 3.0,
) -> Times:
    """Time `repeats` runs after `warm_ups`; after `patience` seconds, only `least` of them.

    Where the runs differ much, or other processes take the processors, they are repeated, in three rounds at most. The
    median is that of the steadiest round, the range is that of all rounds.
    """
    return milliseconds_in_turns([work], device, repeats, warm_ups, least, patience)[0]


def milliseconds_in_turns(
    works: Sequence[Callable[[], object]],
    device: torch.device,
    repeats: int = 20,
    warm_ups: int = 3,
    least: int = 5,
    patience: float = 3.0,
) -> list[Times]:
    """Time several works, which are run in turns (A B C A B C), so that a busy minute slows all of them.

    All medians are those of one round.
    """
    for work in works:
        for _ in range(warm_ups):
            _once(work, device)
    rounds: list[_Round] = []
    while len(rounds) < ROUNDS and not any(some.steady for some in rounds):
        rounds.append(_round(works, device, repeats, least, patience * len(works)))
    best = min(rounds, key=lambda some: (some.disturbed, some.spread))
    found = []
    for number, times in enumerate(best.times):
        every = [ms for some in rounds for ms in some.times[number]]
        steady = not best.disturbed and _spread(times) <= DISAGREE
        found.append(Times(float(median(times)), min(every), max(every), steady))
    return found


def busy_remark(unsteady: Sequence[str]) -> str:
    """Remarks on times that are not steady, by the names of the timed calls."""
    return (
        f"Runs of {', '.join(unsteady)} still differ by more than a tenth after three rounds, or other processes used "
        "the processors meanwhile: the machine is busy."
    )


def _round(
    works: Sequence[Callable[[], object]], device: torch.device, repeats: int, least: int, patience: float
) -> _Round:
    others, began = OtherProcesses(), time.perf_counter()
    times: list[list[float]] = [[] for _ in works]
    for count in range(1, repeats + 1):
        for work, some in zip(works, times, strict=True):
            some.append(_once(work, device))
        if count >= least and time.perf_counter() - began > patience:
            break
    return _Round(times, others.disturb(1 if device.type == "cuda" else torch.get_num_threads()))


def _spread(times: list[float]) -> float:
    """The width of the middle half of the runs, as a share of the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


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


def capture_graph(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
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

    return milliseconds(capture_graph(work, model.device), model.device).low
