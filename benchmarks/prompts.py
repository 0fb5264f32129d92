"""How long does exact reading of prompts take, against the unmodified model's prefill of the same tokens?

    python -m benchmarks.prompts 1x16384:512 8x4096:512 1x16384:512:compressed [--random-weights llama-2-7b] [--compile]

A case is prompts x tokens : size, then the position mode if it is not `original`. The first read compiles and captures;
its seconds are shown. Memory is what reading takes beyond the weights and the state, at most.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import torch

import msrnn
from msrnn.evaluation.benchmark.contenders import random_tokens, use_default_attention
from msrnn.evaluation.benchmark.random_weights import random_model
from msrnn.evaluation.benchmark.timing import milliseconds
from msrnn.evaluation.environment import environment
from msrnn.hf import cuda_graphs
from msrnn.hf.loading import load


def prefill_ms(model: Any, ids: torch.Tensor) -> float:
    with use_default_attention(model):
        return milliseconds(
            lambda: model(ids, logits_to_keep=1, use_cache=False), model.device, repeats=3, warm_ups=1, least=1
        ).median


def reading(model: Any, ids: torch.Tensor, policy: str, size: int, **options: Any) -> dict[str, float]:
    rnn = msrnn.MultiStateRNN(model, policy, size, **options)
    state = rnn.state(ids.shape[0])
    on_gpu = model.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def read() -> None:
        state.reset()
        rnn.read(ids, state, last_only=True)

    began = time.perf_counter()
    read()
    state.seen.tolist()  # waits for the device
    first = time.perf_counter() - began
    ms = milliseconds(read, model.device, repeats=3, warm_ups=0, least=1).median
    memory = {"gigabytes": (torch.cuda.max_memory_allocated() - before) / 1e9} if on_gpu else {}
    return {"ms": ms, "tokens_per_second": 1000 * ids.numel() / ms, "first_read_s": first, **memory}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="PROMPTSxTOKENS:SIZE[:POSITIONS]")
    parser.add_argument("--random-weights", help="a shape such as llama-2-7b, instead of the small default model")
    parser.add_argument("--policy", default="tova")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--block", type=int, nargs="+", default=[None], help="tokens of a block; as by default")
    args = parser.parse_args()
    model: Any = random_model(args.random_weights) if args.random_weights else load().model
    cuda_graphs.WORTH_CAPTURING = cuda_graphs.WORTH_CAPTURING_STEPS = 0  # what later reads of a shape take
    full: dict[tuple[int, int], float] = {}
    for case in args.cases:
        shape, size, *positions = case.split(":")
        rows, tokens = map(int, shape.split("x"))
        ids = random_tokens(model, rows, tokens)
        if (rows, tokens) not in full:
            full[rows, tokens] = prefill_ms(model, ids)
        for block in args.block:
            options = {"positions": (positions or ["original"])[0], "compile": args.compile, "block": block}
            found = reading(model, ids, args.policy, int(size), **options)
            result = {"unmodified_ms": full[rows, tokens], **found, "relative": found["ms"] / full[rows, tokens]}
            name = f"{case}, blocks of {block}" if block else case
            print(name + ": " + ", ".join(f"{key} {value:,.2f}" for key, value in result.items()))
            facts = {"case": case, "policy": args.policy, **options, **environment(model.device)}
            print(json.dumps({**result, **facts}), flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
