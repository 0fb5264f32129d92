"""Does exact reading into a bounded state cost less than the unmodified model's forward pass over the same tokens?

python -m benchmarks.reading [--tokens 4096] [--size 512] [--rounds 3]
"""

from __future__ import annotations

import argparse

import torch

import msrnn
from benchmarks.common import model_and_tokens, report, seconds
from msrnn.evaluation.benchmark.contenders import use_default_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--policy", default="tova")
    parser.add_argument("--rounds", type=int, default=3, help="each measures both, one after the other")
    args = parser.parse_args()

    model, ids = model_and_tokens(args.tokens)
    rnn = msrnn.MultiStateRNN(model, args.policy, args.size)

    @torch.no_grad()
    def forward(count: int) -> None:
        with use_default_attention(model):
            model(ids[:, :count], logits_to_keep=1, use_cache=False)

    def read(count: int) -> None:
        rnn.read(ids[:, :count], rnn.state(), last_only=True)

    measured: dict[str, list[float]] = {"unmodified": [], args.policy: []}
    for warm_up in (forward, read):
        warm_up(256)
    for _ in range(args.rounds):
        measured["unmodified"].append(seconds(lambda: forward(args.tokens)))
        measured[args.policy].append(seconds(lambda: read(args.tokens)))
    report(f"reading {args.tokens} tokens at size {args.size}", measured, "s", target=0.9)


if __name__ == "__main__":
    main()
