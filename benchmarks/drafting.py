"""What could the bounded model bring as a draft of the full model: what it guesses right, and the most to be gained.

    python -m benchmarks.drafting --model MODEL --dtype bfloat16 --text novel.txt --context 8192 32768 --batch 8

The full model answers greedily after a passage of a text. A guess of the bounded model is right where its most likely
token is the full model's, and guesses count up to the first that is wrong. So reading the full model's answer once
shows what every number of guesses would bring. A round costs a bounded step for each guess and one step of the full
model, which is less than checking them takes: the gain is the most that can be reached.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import msrnn
from msrnn.evaluation.benchmark.contenders import Bounded, Contender, StaticFull, setup, use_default_attention
from msrnn.evaluation.benchmark.timing import milliseconds
from msrnn.evaluation.environment import environment
from msrnn.hf.loading import load


def answer(model: Any, ids: Tensor, length: int) -> Tensor:
    """The full model's greedy answer [1, length]."""
    with use_default_attention(model):
        settings: Any = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[:, ids.shape[1] :]


def right_guesses(rnn: msrnn.MultiStateRNN, ids: Tensor, answered: Tensor) -> list[bool]:
    """Whether the bounded model's most likely token is that of the answer, at each of its places."""
    state = rnn.state()
    first = rnn.read(ids, state, last_only=True)
    logits = torch.cat([first, rnn.read(answered[:, :-1], state)], dim=1)
    return (logits.argmax(-1) == answered)[0].tolist()


def tokens_per_round(right: list[bool], guesses: int) -> float:
    """Tokens of the answer for each step of the full model, which adds one to the guesses that are right."""
    at, rounds = 0, 0
    while at < len(right):
        accepted = 0
        while accepted < guesses and at + accepted < len(right) and right[at + accepted]:
            accepted += 1
        at, rounds = at + accepted + 1, rounds + 1
    return len(right) / rounds


def step_milliseconds(contender: Contender, batch: int, rows: int, device: torch.device) -> float:
    with contender.stepping(batch, rows) as step:
        return milliseconds(step, device).median


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a hub name or a folder; the small default model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--policy", default="echo")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--context", type=int, nargs="+", default=[8192], help="tokens of a passage")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="sequences of the steps that are timed")
    parser.add_argument("--guesses", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    model, tokenizer = load(args.model, dtype=args.dtype)
    text = tokenizer(args.text.read_text(), verbose=False, return_tensors="pt")["input_ids"].to(model.device)
    rnn = msrnn.MultiStateRNN(model, args.policy, args.size)
    print(environment(model.device))
    for context in args.context:
        apart = max(1, (text.shape[1] - context) // args.passages)
        passages = [text[:, at : at + context] for at in range(0, apart * args.passages, apart)]
        found = [right_guesses(rnn, ids, answer(model, ids, args.answer)) for ids in passages]
        share = sum(map(sum, found)) / sum(map(len, found))
        draft = step_milliseconds(
            Bounded(model, args.policy, args.size, compile=args.compile), args.batch, args.size, model.device
        )
        full = step_milliseconds(
            StaticFull(setup(model, context), compile=args.compile), args.batch, context, model.device
        )
        print(f"\nafter {context:,} tokens, {100 * share:.1f} % of the guesses are right")
        print(f"a step of {args.batch} sequences: bounded {draft:.2f} ms, full {full:.2f} ms\n")
        print("| guesses | tokens per round | at most times as fast |\n|---|---|---|")
        for guesses in args.guesses:
            tokens = sum(len(right) for right in found) / sum(
                len(right) / tokens_per_round(right, guesses) for right in found
            )
            gain = tokens * full / (guesses * draft + full)
            print(f"| {guesses} | {tokens:.2f} | {gain:.2f} |")
            record = {"context": context, "guesses": guesses, "tokens_per_round": tokens, "right": share, "gain": gain}
            print(json.dumps({**record, "bounded_ms": draft, "full_ms": full, **environment(model.device)}), flush=True)


if __name__ == "__main__":
    main()
