"""How long does a server's engine take until it is fast, and what does its first request wait for?

    python -m benchmarks.first_use --random-weights llama-2-7b --slots 448
    python -m benchmarks.first_use --random-weights llama-2-7b --slots 448 --compile

It starts twice, each time in a new process: first with empty caches of compiled kernels (triton's, and torch's where it
compiles), then with what the first start has left there. Each makes the weights, warms up, and answers two requests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT, ANSWER = 256, 16  # tokens of each request


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in this process -> seconds of each part, and milliseconds to the first tokens of two requests."""
    import msrnn
    from msrnn.evaluation.benchmark.random_weights import random_model
    from msrnn.evaluation.environment import environment

    began = time.perf_counter()
    rnn = msrnn.MultiStateRNN(random_model(args.random_weights), args.policy, args.size, compile=args.compile)
    engine = msrnn.Engine(rnn, args.slots)
    loaded = time.perf_counter()
    marks: list[tuple[str, float]] = []
    engine.warm_up(lambda name: marks.append((name, time.perf_counter())))
    warm = time.perf_counter()
    ends = [at for _, at in marks[1:]] + [warm]
    parts = {name: round(end - at, 2) for (name, at), end in zip(marks, ends, strict=True)}
    first, second = (_first_token(engine, seed) for seed in (1, 2))
    return {
        "loaded_s": round(loaded - began, 1),
        "warm_up_s": round(warm - loaded, 1),
        "first_request_ms": round(1000 * first),
        "second_request_ms": round(1000 * second),
        "parts": parts,
        **environment(rnn.device),
    }


def _first_token(engine: Any, seed: int) -> float:
    """Seconds until the first token of one request's answer, which is then finished."""
    import msrnn

    request = engine.request([seed] * PROMPT, msrnn.SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))
    began, first = time.perf_counter(), 0.0
    engine.add(request)
    while not engine.idle:
        engine.step()
        if request.answers[0].tokens and not first:
            first = time.perf_counter() - began
    return first


def run(args: argparse.Namespace) -> None:
    """Both starts, with caches in a folder of their own."""
    words = [sys.executable, "-m", "benchmarks.first_use", "--one", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name)) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        for number in ("first", "second"):
            done = subprocess.run(words, env={**os.environ, **caches}, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            slowest = sorted(found["parts"].items(), key=lambda part: -part[1])[:4]
            print(
                f"{number} start: weights {found['loaded_s']} s, warm-up {found['warm_up_s']} s; first token of the "
                f"first request after {found['first_request_ms']} ms, of the second {found['second_request_ms']} ms; "
                f"slowest parts: {', '.join(f'{name} {seconds} s' for name, seconds in slowest)}",
                flush=True,
            )
            print(json.dumps({"start": number, **vars(args), **found}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", default="llama-2-7b", help="the shape of the model")
    parser.add_argument("--policy", default="tova")
    parser.add_argument("--size", type=int, default=512, help="KV rows per layer")
    parser.add_argument("--slots", type=int, help="of the decode batch; by default as many as fit")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(start(args)))
    else:
        run(args)


if __name__ == "__main__":
    main()
