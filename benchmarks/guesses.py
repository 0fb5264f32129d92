"""What do guesses bring: the time per token of an engine that guesses, relative to one that does not.

    python -m benchmarks.guesses --text book.txt --prompts 4
    python -m benchmarks.guesses --model MODEL --text book.txt --dtype bfloat16 --guesses 3 7 15
    python -m benchmarks.guesses --model MODEL --text book.txt --draft SMALLER-MODEL --guesses 4

Each prompt has another passage of the text. *edit* asks for it again with one word replaced, *summary* for a summary in
its own sentences, *story* for a continuation. One answer at a time, greedy; both engines must give the same one.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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


class Answer(NamedTuple):
    tokens: list[int]
    seconds: float  # per token, after the first one
    passes: int  # in which the tokens after the first one were computed


def answer(engine: msrnn.Engine, ids: list[int], length: int) -> Answer:
    """A greedy answer of at most this many tokens, alone."""
    request = engine.request(ids, msrnn.SamplingParams(temperature=0, max_tokens=length))
    engine.add(request)
    passes, begin = -1, 0.0
    while not engine.idle:
        passes += bool(engine.step())
        if not begin and request.answers[0].tokens:
            begin = time.perf_counter()
    tokens = request.answers[0].tokens
    return Answer(tokens, (time.perf_counter() - begin) / max(1, len(tokens) - 1), passes)


def measure(
    rnn: msrnn.MultiStateRNN,
    draft: msrnn.MultiStateRNN | None,
    tokenizer: Any,
    prompts: list[list[int]],
    args: argparse.Namespace,
) -> None:
    """Print a line for each number of guesses; figures are medians over the prompts of one task."""
    options: dict[str, Any] = {"tokenizer": tokenizer, "prefix_bytes": 0, "prefix_host_bytes": 0}
    plain = msrnn.Engine(rnn, 1, **options)
    for guesses in args.guesses:
        engine = msrnn.Engine(rnn, 1, guesses=guesses, draft=draft, **options)
        ratios, per_pass, same = [], [], 0
        for ids in prompts:
            turns = [(answer(plain, ids, args.answer), answer(engine, ids, args.answer)) for _ in range(args.turns)]
            without, guessed = zip(*turns, strict=True)
            ratios.append(median(one.seconds for one in without) / median(one.seconds for one in guessed))
            per_pass.append((len(guessed[0].tokens) - 1) / max(1, guessed[0].passes))
            same += all(one.tokens == without[0].tokens for one in guessed)
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
    parser.add_argument("--guesses", type=int, nargs="+", default=[8], help="the most tokens that are guessed at once")
    parser.add_argument("--draft", help="a smaller model, which guesses where the text does not")
    parser.add_argument("--prompts", type=int, default=4, help="passages for each task")
    parser.add_argument("--words", type=int, default=150, help="words of a passage")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer, at most")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile the model between its attention layers")
    args = parser.parse_args()
    loaded = load(args.model, dtype=args.dtype)
    rnn = msrnn.MultiStateRNN(loaded.model, args.policy, args.size, compile=args.compile)
    draft: msrnn.MultiStateRNN | None = None
    if args.draft:
        smaller = load(args.draft, dtype=args.dtype).model
        draft = msrnn.MultiStateRNN(smaller, args.policy, args.size, compile=args.compile)
    words = args.text.read_text().split(" ")
    middle = len(words) // 4
    passages = [" ".join(words[at : at + args.words]) for at in range(middle, len(words), args.words)][: args.prompts]
    print(environment(loaded.model.device))
    for name, task in TASKS.items():
        prompts = [encode_first(loaded.tokenizer, first_messages(task(passage))) for passage in passages]
        print(f"\n{name}, prompts of {len(prompts[0])} tokens\n")
        print("| guesses | tokens per pass | times faster | same answers |\n|---|---|---|---|")
        measure(rnn, draft, loaded.tokenizer, prompts, args)


if __name__ == "__main__":
    main()
