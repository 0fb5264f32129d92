"""What do processes that share a model cost each other? Run under torchrun, on this machine:

    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel [--size 512] [--policies tova tova-head]

A random Llama in float32 reads 2,048 tokens and takes 60 steps; the time that one process waits in sums and gathers is
counted. `--estimate` computes the cost of a decode step on GPUs instead, from the constants below (no torchrun).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed.configuration_utils import DistributedConfig

import msrnn
from msrnn.evaluation.environment import environment
from msrnn.hf.tensor_parallel import ProcessShards

MEMORY, MATMUL = 4.35e12, 471e12  # bytes and operations per second of an H200, measured (docs/results/speed.md)
GPU_BYTES, USED = 149e9, 0.9
NETWORKS = {"NVLink": (450e9, 10e-6), "InfiniBand": (50e9, 25e-6)}  # bytes per second and GPU, seconds per message


class Shape(NamedTuple):
    name: str
    layers: int
    kv_heads: int
    hidden: int
    weights: float
    dim: int = 128

    def row_bytes(self, size: int, ranks: int) -> int:
        """Of one sequence in 16 bits, in all ranks together: each has positions of its own."""
        return self.layers * (size + 1) * (2 * self.kv_heads * self.dim * 2 + ranks * 4)


SHAPES = [Shape("Llama-2-7B", 32, 32, 4096, 6.74e9), Shape("Llama-2-70B", 80, 8, 8192, 69e9)]


def reduction(nbytes: float, ranks: int, network: str) -> float:
    """Seconds of one all-reduce: a message's delay, and twice what each rank does not have yet."""
    speed, delay = NETWORKS[network]
    return delay + 2 * (ranks - 1) / ranks * nbytes / speed


def estimate(shape: Shape, ranks: int, rows: int, size: int, network: str) -> dict[str, float]:
    """Milliseconds of a decode step, by what takes them."""
    weights = max(2 * shape.weights / MEMORY, 2 * shape.weights * rows / MATMUL) / ranks
    states = rows * shape.row_bytes(size, ranks) / ranks / MEMORY
    model = 2 * shape.layers * reduction(rows * shape.hidden * 2, ranks, network)
    evictions = shape.layers * reduction(rows * (size + 2) * 4, ranks, network)
    found = {"weights": weights, "states": states, "model's sums": model, "evictions' sums": evictions}
    return {name: round(1000 * seconds, 2) for name, seconds in found.items()}


def estimates() -> None:
    for shape in SHAPES:
        for ranks in (2, 8):
            for network in NETWORKS:
                for rows in (1, 448):
                    about = {"shape": shape.name, "ranks": ranks, "network": network, "rows": rows, "size": 512}
                    print(json.dumps({**about, **estimate(shape, ranks, rows, 512, network)}))
    shape = SHAPES[1]
    for size in (512, 2048):
        rows = int((8 * GPU_BYTES * USED - 2 * shape.weights) / shape.row_bytes(size, 8))
        times = estimate(shape, 8, rows, size, "NVLink")
        rate = round(1000 * rows / sum(times.values()))
        print(json.dumps({"shape": shape.name, "ranks": 8, "size": size, "rows": rows, **times, "tokens_per_s": rate}))


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Count the seconds that this process spends in sums and gathers."""
    spent = [0.0]
    before = ProcessShards.sum, ProcessShards.gather

    def timed(call: Any) -> Any:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent[0] += time.perf_counter() - began

        return run

    ProcessShards.sum, ProcessShards.gather = map(timed, before)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        ProcessShards.sum, ProcessShards.gather = before  # type: ignore[method-assign]


def measure(model: Any, policy: str, size: int) -> dict[str, Any]:
    rnn = msrnn.MultiStateRNN(model, policy, size)
    ids = torch.randint(0, model.config.vocab_size, (1, 2048), generator=torch.Generator().manual_seed(0))
    rnn.read(ids[:, :64], rnn.state())
    state = rnn.state()
    with waiting() as spent:
        began = time.perf_counter()
        rnn.read(ids, state, last_only=True)
        reading, waited = time.perf_counter() - began, spent[0]
    steps, shares = [], []
    for i in range(60):
        with waiting() as spent:
            began = time.perf_counter()
            rnn.step(ids[:, i : i + 1], state)
            steps.append(time.perf_counter() - began)
            shares.append(spent[0] / steps[-1])
    return {
        "policy": policy,
        "read_s": round(reading, 2),
        "read_share": round(waited / reading, 3),
        "step_ms": round(1000 * median(steps), 2),
        "step_share": round(median(shares), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["tova", "echo", "tova-head"])
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--estimate", action="store_true")
    args = parser.parse_args()
    if args.estimate:
        return estimates()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    shape: Any = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 8192}
    config = LlamaConfig(**shape, num_attention_heads=16, num_key_value_heads=8)
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[0])
    dist.barrier()
    plan: Any = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(Path(folders[0]), dtype="float32", distributed_config=plan)
    for policy in args.policies:
        found = measure(model, policy, args.size)
        if dist.get_rank() == 0:
            print(json.dumps({**found, "size": args.size, "ranks": dist.get_world_size(), **environment("cpu")}))
    dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
