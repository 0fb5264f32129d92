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
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import msrnn
from msrnn.evaluation.environment import environment
from msrnn.hf.loading import load as load_default

CHUNK = b"data: "
# glibc then gives free memory back, so that resident memory is memory in use; otherwise it grows and shrinks by 80 MB.
GIVE_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}


class Reply(NamedTuple):
    text: str
    finish_reason: str | None  # None: the client has left, or the stream broke off
    first_seconds: float  # to the first text
    usage: dict[str, Any]


async def ask(
    address: str, body: dict[str, Any], leave_after: int | None = None, path: str = "/v1/completions", key: str = ""
) -> Reply:
    """Stream one answer over a raw connection; `leave_after` so many chunks the client disconnects."""
    host, _, port = address.removeprefix("http://").partition(":")
    sent = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(sent)}\r\n\r\n"
    began, chunks, text, first = time.perf_counter(), 0, "", 0.0
    reason: str | None = None
    usage: dict[str, Any] = {}
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    try:
        writer.write(head.encode() + sent)
        await writer.drain()
        if leave_after == 0:
            return Reply("", None, 0.0, {})
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r}: {await reader.read()!r}")
        async for line in reader:  # HTTP/1.0: the body has no frames, and ends with the connection
            if not line.startswith(CHUNK) or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[len(CHUNK) :])
            for choice in chunk["choices"]:
                new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                first = first or (time.perf_counter() - began if new else 0.0)
                text += new
                reason = choice["finish_reason"] or reason
            usage = chunk.get("usage") or usage
            chunks += 1
            if chunks == leave_after:
                return Reply(text, None, first, {})
        return Reply(text, reason, first, usage)
    finally:
        writer.transport.abort() if leave_after is not None else writer.close()


async def ask_at_once(
    address: str, bodies: Sequence[dict[str, Any]], leave_after: Sequence[int | None], key: str = ""
) -> list[Reply]:
    """One client for each body, all at the same time."""
    pairs = zip(bodies, leave_after, strict=True)
    return await asyncio.gather(*(ask(address, body, leave, key=key) for body, leave in pairs))


def leaving(clients: int, most_chunks: int, seed: int) -> list[int | None]:
    """When each client leaves; one in five does."""
    draw = random.Random(seed)
    gone = set(draw.sample(range(clients), clients // 5))
    return [draw.randint(0, most_chunks) if i in gone else None for i in range(clients)]


@contextmanager
def serving(*options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`msrnn serve` with these options, as a process of its own, and its address; killed at the end."""
    program = [sys.executable, "-c", "from msrnn.cli import main; main()"]
    command = [*program, "serve", "--port", "0", "--quiet", *map(str, options)]  # no one reads the lines of requests
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **GIVE_BACK})
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/v1", line):
                yield process, found[1]
                return
        raise RuntimeError(f"the server did not start: {said}")
    finally:
        process.kill()
        process.wait()


def usage_of(process: int) -> dict[str, float]:
    """Resident memory and open files of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return {"rss_mb": int(found[1]) / 1000, "files": len(os.listdir(f"/proc/{process}/fd"))}


def metrics(address: str) -> dict[str, float]:
    """What `/metrics` says, without labels."""
    import httpx

    text = httpx.get(f"{address}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^msrnn_(\w+) (\S+)$", text, flags=re.MULTILINE)}


def settled(address: str) -> dict[str, float]:
    """Metrics once nothing runs and nothing waits; waits for it."""
    for _ in range(600):
        found = metrics(address)
        if found["num_requests_running"] == found["num_requests_waiting"] == 0:
            return found
        time.sleep(0.05)
    raise RuntimeError(f"requests are left: {found}")


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
        options = ("--model", folder, "--size", 16, "--rows", 16, "--queue", clients, "--dtype", "float32")
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
