"""Does a chat still find its first message, thousands of tokens later?

    python -m benchmarks.first_message --text novel.txt --tokens 30000 --recall 16 64
    python -m benchmarks.first_message --model MODEL --dtype bfloat16 --text novel.txt --tokens 40000 --kind chat --full

The first message states two facts, and each is asked for at the end. *text*: the second message is a long piece of a
novel. *chat*: pieces of 250 tokens, each with a short answer. Versions that may pass the training length continue with
a horizon and compressed positions, as `--positions auto` does. Right answers are counted.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import torch

import msrnn
from msrnn.core.rope import ORIGINAL
from msrnn.evaluation.data.needles import WORDS
from msrnn.evaluation.environment import environment
from msrnn.hf.extension import extension, training_length
from msrnn.hf.loading import load

PIECE = 250  # tokens of a turn
SPARE = 200  # tokens: more than a question and its answer take
REPLIES = (
    "I liked the part about {}.",
    "So {} matters here.",
    "What an odd scene, with {} in it!",
    "Go on, I want to know about {}.",
    "{} is a fine word.",
    "I did not expect {} there.",
    "That was sad, and {} made it worse.",
    "Who would have thought of {}?",
)
Message = dict[str, str]


def exchange(said: str, answered: str) -> list[Message]:
    return [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]


def chat(kind: str, tokens: int, novel: list[int], tokenizer: Any, draw: random.Random) -> tuple[list[Message], Any]:
    """The messages of a chat, and the questions about its first one with their answers."""
    facts, asked = [], []
    for _ in range(2):
        name, number = "-".join(draw.sample(WORDS, 2)), str(draw.randint(1_000_000, 9_999_999))
        facts.append(f"The code of my {name} is {number}.")
        asked.append((f"What is the code of my {name}?", number))
    messages = exchange(f"{' '.join(facts)} Please remember this.", "I will remember it.")
    length = tokens if kind == "text" else PIECE
    for _ in range(tokens // length):
        start = draw.randrange(len(novel) - length)
        piece = tokenizer.decode(novel[start : start + length])
        word = draw.choice([word for word in piece.split() if len(word) > 5 and word.isalpha()])
        messages += exchange(piece, "Thank you for the text." if kind == "text" else draw.choice(REPLIES).format(word))
    return messages, asked


def encode(tokenizer: Any, messages: list[Message], asks: bool) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False)
    return ids


def count_common(one: list[int], other: list[int]) -> int:
    """The tokens that both begin with."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def find(rnn: msrnn.MultiStateRNN, tokenizer: Any, messages: list[Message], asked: Any) -> list[bool]:
    """Read a chat once, and ask each question from a copy of its state -> whether the answers are right."""
    read = encode(tokenizer, messages, asks=False)
    prompts = [
        encode(tokenizer, [*messages, {"role": "user", "content": question}], asks=True) for question, _ in asked
    ]
    shared = min(count_common(read, prompt) for prompt in prompts)
    state, right = rnn.state(), []
    rnn.read(torch.tensor([read[:shared]]), state, last_only=True)
    for prompt, (_, number) in zip(prompts, asked, strict=True):
        ids = torch.tensor([prompt[shared:]])
        out = rnn.generate(ids, state=state.fork(1), max_new_tokens=24, do_sample=False)
        answer = tokenizer.decode(out[0][ids.shape[1] :], skip_special_tokens=True)
        print(f"  {number in answer!s:5} {number}: {answer[:70]!r}", flush=True)
        right.append(number in answer)
    return right


def wrap(model: Any, args: argparse.Namespace, length: int, rows: int | None) -> msrnn.MultiStateRNN:
    """The model with the policy and size of `args`, for a chat of `length` tokens.

    rows  that each token of a question recalls, per layer and KV head; None: the full model instead
    """
    policy, positions, longest = args.policy, ORIGINAL, training_length(model)
    passes = longest is not None and length + SPARE > longest
    if rows is None:
        if passes:
            raise SystemExit(f"--full: this model was trained on {longest:,} tokens, and the chat has {length:,}")
        return msrnn.MultiStateRNN(model, "full")
    if longest is not None and passes:
        policy, positions = extension(policy, args.size, longest)
    return msrnn.MultiStateRNN(model, policy, args.size, positions=positions, recall=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a hub name or a folder; the small default model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kind", nargs="+", default=["text"], choices=["text", "chat"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[30_000], help="between the first message and the end")
    parser.add_argument("--policy", default="echo")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--recall", type=int, nargs="+", default=[64], help="rows; 0: none")
    parser.add_argument("--full", action="store_true", help="also the full model")
    parser.add_argument("--chats", type=int, default=5, help="of two questions each")
    args = parser.parse_args()
    model, tokenizer = load(args.model, dtype=args.dtype)
    novel = tokenizer(args.text.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    if "text" in args.kind and max(args.tokens) >= len(novel):
        parser.error(f"{args.text} has {len(novel):,} tokens: give a longer text, or --kind chat")
    print(json.dumps(environment(model.device)))
    for kind, tokens, rows in product(args.kind, args.tokens, [None] * args.full + args.recall):
        found: list[bool] = []
        for number in range(args.chats):
            messages, asked = chat(kind, tokens, novel, tokenizer, random.Random(number))
            length = len(encode(tokenizer, messages, asks=False))  # with the chat template and all answers
            with wrap(model, args, length, rows) as rnn:
                found += find(rnn, tokenizer, messages, asked)
        name = "full" if rows is None else f"{args.policy} {args.size} + {rows}"
        print(f"| {kind} | {tokens:,} | {name} | {sum(found)} of {len(found)} |", flush=True)


if __name__ == "__main__":
    main()
