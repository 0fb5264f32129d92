"""Compare policies by perplexity on your own text, and see how near they are to the full model.

    msrnn download                                    # the small default model, once; not needed with --model
    python examples/compare_policies.py book.txt --size 256 [--tokens 4096] [--model NAME]

`msrnn eval perplexity` does the same for many texts and sizes, with confidence intervals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msrnn
from msrnn.evaluation.loss import losses
from msrnn.hf.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--size", type=int, default=256, help="KV cache rows per layer")
    parser.add_argument("--tokens", type=int, default=4096, help="how much of the text to read")
    parser.add_argument("--policy", nargs="+", default=["window+4", "tova", "echo", "full"])
    parser.add_argument("--model", help="a name on the hub, a folder or a .gguf file")
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    ids = tokenizer(given.text.read_text(), return_tensors="pt").input_ids[:, : given.tokens]
    print(f"{ids.shape[1]:,} tokens, size {given.size}")
    for policy in given.policy:
        rnn = msrnn.MultiStateRNN(model, policy, None if policy == "full" else given.size)
        state = rnn.state()
        perplexity = losses(rnn, ids, state).mean().exp().item()
        print(f"{policy:12} perplexity {perplexity:8.2f}   {state.nbytes:13,} bytes")


if __name__ == "__main__":
    main()
