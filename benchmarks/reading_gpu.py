"""What does exact reading into a bounded state cost on a GPU, against the unmodified model's prefill?

    python -m benchmarks.reading_gpu [--tokens 4096] [--batch 8] [--size 512]

Random weights of Llama-2-7B's shape in bfloat16; the unmodified model runs SDPA and keeps no cache.
"""

from __future__ import annotations

import argparse
import json

import torch

import msrnn
from benchmarks.common import unmodified
from benchmarks.gpu import llama_2_7b, milliseconds, setting_with_gpu


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--policy", default="tova")
    args = parser.parse_args()
    model = llama_2_7b()
    rnn = msrnn.MultiStateRNN(model, args.policy, args.size)
    ids = torch.randint(5, 30000, (args.batch, args.tokens), device="cuda")
    with unmodified(model):
        dense = milliseconds(lambda: model(ids, logits_to_keep=1, use_cache=False), repeats=5)
    exact = milliseconds(lambda: rnn.read(ids, rnn.state(args.batch), last_only=True), repeats=3)
    print(
        f"{args.batch} x {args.tokens} tokens at size {args.size}: unmodified {dense:.0f} ms, "
        f"{args.policy} {exact:.0f} ms; ratio {exact / dense:.2f}"
    )
    print(json.dumps({**vars(args), "unmodified_ms": dense, "exact_ms": exact, **setting_with_gpu()}))


if __name__ == "__main__":
    main()
