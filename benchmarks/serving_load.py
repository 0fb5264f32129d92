"""Does the server hold under load, and is turn 10 of a chat as fast as turn 1?

    python -m benchmarks.serving_load load [--clients 1000] [--rounds 3]
    python -m benchmarks.serving_load chat [--turns 10] [--chats 5]

`load`: clients stream at the same time from a tiny random model, and one in five disconnects at a random moment. All
others must receive their whole answer; the memory and the open files of the server are printed after each round.
`chat`: a client without a session resends its whole history at every turn to the small default model.
Both start `msrnn serve` as a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import msrnn
from msrnn.evaluation.environment import environment
from msrnn.hf.loading import load as load_default
from tests.helpers.serving import ask, ask_at_once, leaving, serving, settled, usage_of


def tiny_model(folder: Path, tokenizer: Any) -> msrnn.MultiStateRNN:
    """A random model of two layers with this tokenizer, in a folder."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, initializer_range=0.2, eos_token_id=None, **shape
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return msrnn.MultiStateRNN(model, "tova", 16)


def measure_load(clients: int, rounds: int) -> dict[str, Any]:
    tokenizer, draw, tokens = load_default(device="cpu").tokenizer, random.Random(0), 8
    prompts = [[draw.randrange(1000, 40000) for _ in range(draw.randint(3, 40))] for _ in range(50)]
    with tempfile.TemporaryDirectory() as folder:
        rnn = tiny_model(Path(folder), tokenizer)
        expected = []
        for prompt in prompts:
            ids = rnn.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)
            expected.append(tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True))
        options = ("--model", folder, "--size", 16, "--slots", 16, "--queue", clients, "--dtype", "float32")
        with serving(*options) as (process, address):
            found: dict[str, Any] = {"clients": clients, "rounds": []}
            for number in range(rounds):
                leave = leaving(clients, tokens, number)
                bodies = [
                    {"prompt": prompts[i % 50], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
                    for i in range(clients)
                ]
                began = time.perf_counter()
                replies = asyncio.run(ask_at_once(address, bodies, leave))
                seconds = time.perf_counter() - began
                stayed = [(i, reply) for i, reply in enumerate(replies) if leave[i] is None]
                wrong = sum(reply.text != expected[i % 50] or reply.finish_reason != "length" for i, reply in stayed)
                settled(address)
                time.sleep(1)  # until the last sockets are closed
                last = {"stayed": len(stayed), "left": clients - len(stayed), "wrong": wrong, "seconds": seconds}
                found["rounds"].append({**last, **usage_of(process.pid)})
                print(found["rounds"][-1], flush=True)
    return found


def measure_chat(turns: int, chats: int) -> dict[str, Any]:
    """Seconds to the first token, and tokens read, by turn."""
    rows: list[list[tuple[float, int, int]]] = []
    with serving("--dtype", "float32") as (_, address):
        for chat in range(-1, chats):  # the first one warms up
            history: list[dict[str, str]] = []
            rows.append([])
            for turn in range(turns):
                text = f"This is question {turn + 1} of guest {chat + 2}: what should I know about the number {turn}?"
                history.append({"role": "user", "content": text})
                body = {"messages": history, "max_tokens": 24, "temperature": 0}
                reply = asyncio.run(ask(address, body, path="/v1/chat/completions"))
                history.append({"role": "assistant", "content": reply.text})
                prompt = reply.usage["prompt_tokens"]
                read = prompt - reply.usage["prompt_tokens_details"]["cached_tokens"]
                rows[-1].append((reply.first_seconds, prompt, read))
    found = []
    for turn in range(turns):
        seconds, prompt, read = zip(*(chat[turn] for chat in rows[1:]), strict=True)
        middle = {"seconds": round(median(seconds), 4), "prompt_tokens": median(prompt), "tokens_read": median(read)}
        found.append({"turn": turn + 1, **middle})
        print(found[-1], flush=True)
    ratio = found[-1]["seconds"] / found[0]["seconds"]
    print(f"turn {turns} takes {ratio:.2f} times as long as turn 1 to its first token (target: at most 1.5)")
    return {"chats": chats, "turns": found, "ratio": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "chat"])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--chats", type=int, default=5)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard)
    )  # the server inherits it
    load = args.what == "load"
    found = measure_load(args.clients, args.rounds) if load else measure_chat(args.turns, args.chats)
    print(json.dumps({"what": args.what, **found, **environment()}))


if __name__ == "__main__":
    main()
