"""Is a decode step from a bounded state faster than the unmodified model's, and the same after any length?

python -m benchmarks.stepping [--context 3072] [--size 512] [--far 16000] [--rounds 8]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle

import torch
from transformers import DynamicCache

import msrnn
from benchmarks.common import model_and_tokens, report, seconds

Timed = Callable[[], float]  # runs a decode step and returns its seconds
STEPS = 10  # steps per round; the first one is slower, since the other model ran before, and is not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=3072, help="tokens before the step that is compared")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--policy", default="tova")
    parser.add_argument("--far", type=int, default=16_000, help="tokens before the step that shows constant time")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    near = 1000

    model, ids = model_and_tokens(args.far)
    rnn = msrnn.MultiStateRNN(model, args.policy, args.size)
    baseline, _ = model_and_tokens(args.context)
    supply = cycle(ids[0].split(1))

    def after(count: int) -> Timed:
        state = rnn.state()
        rnn.read(ids[:, :count], state, last_only=True)
        return lambda: seconds(lambda: rnn.step(next(supply)[None], state))

    cache = DynamicCache(config=baseline.config)
    with torch.no_grad():
        baseline(ids[:, : args.context], past_key_values=cache, logits_to_keep=1)

    @torch.no_grad()
    def unmodified() -> float:
        took = seconds(lambda: baseline(next(supply)[None], past_key_values=cache))
        cache.crop(-1)  # every step is taken at the same length
        return took

    compare(
        f"a step at size {args.size} after {args.context} tokens",
        {"unmodified": unmodified, args.policy: after(args.context)},
        args.rounds,
        target=0.8,
    )
    compare(
        f"a step after {args.far} tokens against one after {near}",
        {f"after {near}": after(near), f"after {args.far}": after(args.far)},
        args.rounds,
        target=1.05,
    )


def compare(question: str, steps: dict[str, Timed], rounds: int, target: float) -> None:
    """Alternate rounds of each, so that noise of the machine affects all."""
    measured: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            measured[name] += [round(1000 * step(), 2) for _ in range(STEPS - 1)]
    report(question, measured, "ms", target)


if __name__ == "__main__":
    main()
