"""Do the time of a decode step and the memory depend on the number of tokens read?

    python -m benchmarks.lengths [--random-weights llama-2-7b] [--tokens 1000 --tokens 100000] [--size 512]

One sequence is read from each length to the next. Memory is the allocated GPU memory without the weights.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

import msrnn
from msrnn.evaluation.benchmark.contenders import random_tokens
from msrnn.evaluation.benchmark.random_weights import random_model
from msrnn.evaluation.benchmark.timing import milliseconds
from msrnn.evaluation.environment import environment
from msrnn.hf.loading import load

LENGTHS = [1000, 4096, 16384, 65536, 100_000]


def megabytes(weights: int) -> dict[str, float]:
    """GPU memory without the weights, held now and at its peak; empty on a CPU."""
    if not torch.cuda.is_available():
        return {}
    allocated = {"held_mb": torch.cuda.memory_allocated(), "peak_mb": torch.cuda.max_memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    return {name: (value - weights) / 1e6 for name, value in allocated.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", help="a shape such as llama-2-7b, instead of the small default model")
    parser.add_argument("--tokens", type=int, action="append", help=f"lengths, by default {LENGTHS}")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--policy", default="tova")
    args = parser.parse_args()
    model: Any = random_model(args.random_weights) if args.random_weights else load().model
    rnn = msrnn.MultiStateRNN(model, args.policy, args.size)
    # Warm-up: compile, capture and allocate everything that happens only once before measuring.
    rnn.read(random_tokens(model, 1, 8 * rnn.block), rnn.state(), last_only=True)
    state, read, weights = rnn.state(), 0, sum(p.nbytes for p in model.parameters())
    lengths = sorted(args.tokens or LENGTHS)
    ids = random_tokens(model, 1, lengths[-1])
    for length in lengths:
        began = time.perf_counter()
        rnn.read(ids[:, read:length], state, last_only=True).tolist()
        speed = (length - read) / (time.perf_counter() - began)
        step = milliseconds(lambda: rnn.step(ids[:, :1], state), model.device).median
        read = length
        result = {"tokens": length, "step_ms": step, "tokens_per_second": speed, **megabytes(weights)}
        print(", ".join(f"{name} {value:,.2f}" for name, value in result.items()))
        print(json.dumps({**result, "size": args.size, "policy": args.policy, **environment(model.device)}))


if __name__ == "__main__":
    main()
