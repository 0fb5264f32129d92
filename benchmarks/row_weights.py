"""What do learned row weights cost on this GPU: a decode step, and reading, against the same policy without them?

    python -m benchmarks.row_weights [--random-weights llama-2-7b] [--batch 192] [--hidden 16] [--rounds 5]

The networks have random numbers: time does not depend on them. All steps and reads replay captured graphs, and both
versions take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import msrnn
from benchmarks.common import report, seconds
from msrnn.core.weight_network import PARAMETERS, WeightNetwork
from msrnn.core.weights_file import HeadShape, save_weights
from msrnn.evaluation.benchmark.contenders import fill
from msrnn.evaluation.benchmark.random_weights import random_model
from msrnn.hf.inspect import inspect_model
from msrnn.hf.learned_weights import head_shapes

STEPS = 20  # of a round
TEXT = 16_384  # tokens
WARM_UP = 4  # reads of one shape, after which its graph is captured


def random_network(shape: HeadShape, hidden: int) -> WeightNetwork:
    heads, inputs = shape.kv_heads, shape.key_dim + shape.value_dim
    shapes = [(heads, inputs), (heads, inputs), (heads, hidden, inputs), (heads, hidden), (heads, hidden), (heads,), ()]
    tensors: dict[str, Any] = {name: torch.rand(size) / 8 + 0.5 for name, size in zip(PARAMETERS, shapes, strict=True)}
    return WeightNetwork(**tensors)


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()

    def until_done() -> None:
        work()
        torch.cuda.synchronize()

    return seconds(until_done)


def take_turns(works: dict[str, Callable[[], object]], rounds: int, scale: float) -> dict[str, list[float]]:
    for work in works.values():
        for _ in range(WARM_UP):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(scale * timed(work))
    return times


def read(rnn: msrnn.MultiStateRNN, ids: Tensor) -> None:
    rnn.read(ids, rnn.state(), last_only=True)


def steps_of(rnn: msrnn.MultiStateRNN, batch: int) -> Callable[[], object]:
    state = rnn.state(batch)
    fill(state)
    ids = torch.ones(batch, 1, dtype=torch.long, device=rnn.device)

    def steps() -> None:
        for _ in range(STEPS):
            rnn.step(ids, state)

    return steps


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", default="llama-2-7b", help="a shape, such as llama-3-8b")
    parser.add_argument("--batch", type=int, default=192, help="sequences of a large decode step, twice in memory")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=16, help="numbers of each network's hidden layer")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run this on a machine with a GPU")
    torch.manual_seed(0)
    model = random_model(args.random_weights)
    spec = inspect_model(model)
    what = f"{args.random_weights}, echo {args.size}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.safetensors"
        networks = [shape and random_network(shape, args.hidden) for shape in head_shapes(spec)]
        save_weights(file, networks, spec.rounded_fingerprint, spec.architecture)
        policies = {"without": "echo", "with": f"echo@{file}"}
        for batch in (1, args.batch):
            rnns = {name: msrnn.MultiStateRNN(model, policy, args.size) for name, policy in policies.items()}
            works: dict[str, Callable[[], object]] = {name: steps_of(rnn, batch) for name, rnn in rnns.items()}
            times = take_turns(works, args.rounds, 1000 / STEPS)
            report(f"a step of {batch} x {args.size} with row weights, {what}", times, "ms", target=1.02)
            for rnn in rnns.values():
                rnn.release()
            del rnns, works
            torch.cuda.empty_cache()
        ids = torch.randint(model.config.vocab_size, (1, TEXT), device=model.device)
        rnns = {name: msrnn.MultiStateRNN(model, policy, args.size) for name, policy in policies.items()}
        reads: dict[str, Callable[[], object]] = {name: partial(read, rnn, ids) for name, rnn in rnns.items()}
        report(f"reading {TEXT:,} tokens with row weights, {what}", take_turns(reads, args.rounds, 1), "s", target=1.02)


if __name__ == "__main__":
    main()
