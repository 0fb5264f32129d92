"""How far is a decode step on a GPU from the time it takes to read the states once and to do the matrix products?

    python -m benchmarks.step_gpu [--size 512] [--batch 448]

Random weights of Llama-2-7B's shape in bfloat16; the state is filled with random keys and values, as if it had read.
The floor is measured in the same run: the bytes of the states over the read bandwidth, plus the larger of the bytes of
the weights over that bandwidth and the time of the step's own matrix products.
"""

from __future__ import annotations

import argparse
import json

import torch
from transformers import LlamaForCausalLM

import msrnn
from benchmarks.gpu import llama_2_7b, milliseconds, setting_with_gpu


def bandwidth() -> float:
    """Bytes read per millisecond: the sum of a buffer far larger than the cache."""
    buffer = torch.ones(2**31, dtype=torch.int8, device="cuda").view(torch.float32)
    return float(buffer.nbytes) / milliseconds(lambda: buffer.sum())


def products(model: LlamaForCausalLM, batch: int) -> float:
    """Milliseconds of the step's matrix products alone."""
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(batch, m.in_features, device="cuda", dtype=m.weight.dtype) for m in linears}
    graph = torch.cuda.CUDAGraph()
    for linear in linears[:8]:
        linear(inputs[linear.in_features])
    with torch.cuda.graph(graph):
        for linear in linears:
            linear(inputs[linear.in_features])
    return milliseconds(graph.replay)


def filled(rnn: msrnn.MultiStateRNN, batch: int, size: int) -> msrnn.MultiState:
    state = rnn.state(batch)
    for layer in state.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.position[..., :size] = torch.arange(size, device="cuda")
        layer.seen.fill_(size)
    return state


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch", type=int, default=448)
    parser.add_argument("--policy", default="tova")
    args = parser.parse_args()
    reads = bandwidth()
    torch.cuda.empty_cache()
    model = llama_2_7b()
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    matmuls = products(model, args.batch)
    rnn = msrnn.MultiStateRNN(model, args.policy, args.size)
    state = filled(rnn, args.batch, args.size)
    ids = torch.randint(5, 30000, (args.batch, 1), device="cuda")
    step = milliseconds(lambda: rnn.step(ids, state))
    floor = state.nbytes / reads + max(weights / reads, matmuls)
    print(
        f"size {args.size}, batch {args.batch}: {step:.2f} ms a step, floor {floor:.2f} ms "
        f"(states {state.nbytes / reads:.2f}, weights {weights / reads:.2f}, products {matmuls:.2f}); "
        f"ratio {step / floor:.3f}; {1000 * args.batch / step:,.0f} tokens/s"
    )
    found = {"size": args.size, "batch": args.batch, "step_ms": step, "floor_ms": floor, "ratio": step / floor}
    print(json.dumps({**found, "gigabytes_per_second": reads / 1e6, **setting_with_gpu()}))


if __name__ == "__main__":
    main()
