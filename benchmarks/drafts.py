"""What do guesses from the prompt bring: time per token with `prompt_lookup_num_tokens`, relative to none.

    python -m benchmarks.drafts --text book.txt --prompts 4 --answer 128
    python -m benchmarks.drafts --model MODEL --text book.txt --dtype bfloat16 --guesses 4 8 16

Each prompt has another passage of the text. *edit* asks for it again with one word replaced, *summary* for a summary in
its own sentences, *story* for a continuation. Answers are greedy, and both ways must give the same one.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import msrnn
from msrnn.evaluation.environment import environment
from msrnn.hf.chat_template import encode_first, first_messages
from msrnn.hf.loading import load


def edit(passage: str) -> str:
    words = Counter(word for word in passage.split() if word.isalpha() and word[0].isupper() and len(word) > 3)
    word = words.most_common(1)[0][0] if words else "the"
    return f"Write this text again, with {word!r} replaced by 'Margaret'. Change nothing else.\n\n{passage}"


def summary(passage: str) -> str:
    return f"Summarise this text in a few of its own sentences.\n\n{passage}"


def story(passage: str) -> str:
    return f"Continue this story with something new.\n\n{passage}"


TASKS: dict[str, Callable[[str], str]] = {"edit": edit, "summary": summary, "story": story}


class Clock:
    """A listener that notes when the prompt and each group of tokens have come."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        pass

    @property
    def per_token(self) -> float:
        """Seconds per token after the first group, which comes with the prompt."""
        return (self.times[-1] - self.times[1]) / sum(self.counts[2:])

    @property
    def per_pass(self) -> float:
        """Tokens of a forward pass."""
        return sum(self.counts[2:]) / len(self.counts[2:])


def answer(rnn: msrnn.MultiStateRNN, ids: Tensor, length: int, guesses: int) -> tuple[Tensor, Clock]:
    """A greedy answer of this many tokens, and its clock."""
    clock, more = Clock(), {"prompt_lookup_num_tokens": guesses} if guesses else {}
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": length, "min_new_tokens": length, **more}
    return rnn.generate(ids, streamer=clock, **settings)[:, ids.shape[1] :], clock


def measure(rnn: msrnn.MultiStateRNN, prompts: list[Tensor], args: argparse.Namespace) -> None:
    """Print a line for each number of guesses: the ratio of times per token, the median over prompts of one task."""
    for guesses in args.guesses:
        ratios, per_pass, same = [], [], 0
        for ids in prompts:
            plain, guessed = [], []
            for _ in range(args.turns):  # in turn, so that both see the same machine
                expected, without = answer(rnn, ids, args.answer, 0)
                found, clock = answer(rnn, ids, args.answer, guesses)
                plain.append(without.per_token)
                guessed.append(clock.per_token)
            ratios.append(median(plain) / median(guessed))
            per_pass.append(clock.per_pass)
            same += torch.equal(expected, found)
        print(
            f"| {guesses} | {median(per_pass):.2f} | **{median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {same} of {len(prompts)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a hub name or a folder; the small default model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--text", type=Path, required=True, help="a text, of which each task takes a passage")
    parser.add_argument("--policy", default="echo")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--guesses", type=int, nargs="+", default=[8], help="tokens that are guessed at once")
    parser.add_argument("--prompts", type=int, default=4, help="passages for each task")
    parser.add_argument("--words", type=int, default=150, help="words of a passage")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    loaded = load(args.model, dtype=args.dtype)
    rnn = msrnn.MultiStateRNN(loaded.model, args.policy, args.size)
    words = args.text.read_text().split(" ")
    middle = len(words) // 4
    passages = [" ".join(words[at : at + args.words]) for at in range(middle, len(words), args.words)][: args.prompts]
    print(environment(loaded.model.device))
    for name, task in TASKS.items():
        prompts = [
            torch.tensor([encode_first(loaded.tokenizer, first_messages(task(passage)))], device=rnn.device)
            for passage in passages
        ]
        print(f"\n{name}, prompts of {prompts[0].shape[1]} tokens\n")
        print("| guesses | tokens per pass | times faster | same answers |\n|---|---|---|---|")
        measure(rnn, prompts, args)


if __name__ == "__main__":
    main()
